"""What a command is given by name."""

from __future__ import annotations

from difflib import get_close_matches

from django.core.management.base import CommandError

from django_workflows import registry
from django_workflows.declarations import WorkflowDefinition


def the_workflow(name: str) -> WorkflowDefinition:
    """The workflow of this stored name or alias. Raises `CommandError`, naming the nearest."""
    recipient = registry.current().recipient(name)
    if isinstance(recipient, WorkflowDefinition):
        return recipient
    near = get_close_matches(name, [w.name for w in registry.current().workflows], n=1, cutoff=0.5)
    remedy = f"Did you mean {near[0]}?" if near else "list_workflows shows what there is."
    raise CommandError(f"No workflow is named {name!r}. {remedy}")
