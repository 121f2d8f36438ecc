"""The process drawn: a workflow's steps, what they exchange, and where an instance is.

`graph_of` reads it; `as_svg`, `as_mermaid`, `as_dot` and `as_json` draw it, and `svg_for` does
both for an instance.
"""

from __future__ import annotations

import difflib

from django.utils.safestring import SafeString

from django_workflows import registry
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import NotDeclared
from django_workflows.graph.drawing import as_svg
from django_workflows.graph.reading import read as graph_of
from django_workflows.graph.shape import Edge, Graph, Kind, Mark, Node
from django_workflows.graph.text import as_dot, as_json, as_mermaid
from django_workflows.models import WorkflowState

__all__ = [
    "Edge",
    "Graph",
    "Kind",
    "Mark",
    "Node",
    "as_dot",
    "as_json",
    "as_mermaid",
    "as_svg",
    "definition_of",
    "graph_of",
    "svg_for",
    "workflow_named",
]


def svg_for(instance: WorkflowState) -> SafeString | None:
    """The instance's workflow as SVG for a page that has graph.css, with its position marked.

    None when nothing declares the workflow any more.
    """
    definition = definition_of(instance)
    return as_svg(graph_of(definition, instance)) if definition else None


def definition_of(instance: WorkflowState) -> WorkflowDefinition | None:
    """What declares the workflow of this instance."""
    state = type(instance)
    for definition in registry.current().workflows:
        if definition.state is state:
            return definition
    return None


def workflow_named(name: str) -> WorkflowDefinition:
    """The workflow of this stored name or alias. Raises `NotDeclared`."""
    recipient = registry.current().recipient(name)
    if isinstance(recipient, WorkflowDefinition):
        return recipient
    known = [definition.name for definition in registry.current().workflows]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "list_workflows shows what there is."
    raise NotDeclared(f"No workflow is named {name!r}. {remedy}")
