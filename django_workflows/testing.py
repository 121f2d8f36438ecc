"""For tests of what is declared with django_workflows."""

from django_workflows.registry import isolated as isolated_registry

__all__ = ["isolated_registry"]
