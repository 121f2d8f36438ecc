"""Message-driven workflows for Django whose state is a model and whose steps are transactions.

The names below are imported on first use, since settings import `django_workflows.broker`
before the models can be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_workflows.context import HandlerContext, WorkflowContext, publish, send
    from django_workflows.handlers import handles
    from django_workflows.messages import Command, Event
    from django_workflows.registry import attribute
    from django_workflows.workflows import Workflow, define_workflow, started_by, when

__version__ = "0.1.0"

_MODULES = {
    "Command": "messages",
    "Event": "messages",
    "HandlerContext": "context",
    "Workflow": "workflows",
    "WorkflowContext": "context",
    "attribute": "registry",
    "define_workflow": "workflows",
    "handles": "handlers",
    "publish": "context",
    "send": "context",
    "started_by": "workflows",
    "when": "workflows",
}

__all__ = [
    "Command",
    "Event",
    "HandlerContext",
    "Workflow",
    "WorkflowContext",
    "attribute",
    "define_workflow",
    "handles",
    "publish",
    "send",
    "started_by",
    "when",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
