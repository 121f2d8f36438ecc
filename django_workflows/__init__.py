"""Message-driven workflows for Django whose state is a model and whose steps are transactions.

The names below are imported on first use, since settings import `django_workflows.broker`
before the models can be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_workflows.cancelling import cancel_instance
    from django_workflows.context import HandlerContext, WorkflowContext, publish, send
    from django_workflows.declarations import attribute, wait
    from django_workflows.errors import RetryLater, Unrecoverable
    from django_workflows.handlers import handles
    from django_workflows.lines import line, stage
    from django_workflows.messages import Command, Event, Sensitive
    from django_workflows.notices import CommandFailed, WorkflowEnded
    from django_workflows.workflows import (
        Workflow,
        define_workflow,
        on_failure,
        started_by,
        when,
        when_all,
        when_completed,
    )

__version__ = "0.1.0"

_MODULES = {
    "Command": "messages",
    "CommandFailed": "notices",
    "Event": "messages",
    "HandlerContext": "context",
    "RetryLater": "errors",
    "Sensitive": "messages",
    "Unrecoverable": "errors",
    "Workflow": "workflows",
    "WorkflowContext": "context",
    "WorkflowEnded": "notices",
    "attribute": "declarations",
    "cancel_instance": "cancelling",
    "define_workflow": "workflows",
    "handles": "handlers",
    "line": "lines",
    "on_failure": "workflows",
    "publish": "context",
    "send": "context",
    "stage": "lines",
    "started_by": "workflows",
    "wait": "declarations",
    "when": "workflows",
    "when_all": "workflows",
    "when_completed": "workflows",
}

__all__ = [
    "Command",
    "CommandFailed",
    "Event",
    "HandlerContext",
    "RetryLater",
    "Sensitive",
    "Unrecoverable",
    "Workflow",
    "WorkflowContext",
    "WorkflowEnded",
    "attribute",
    "cancel_instance",
    "define_workflow",
    "handles",
    "line",
    "on_failure",
    "publish",
    "send",
    "stage",
    "started_by",
    "wait",
    "when",
    "when_all",
    "when_completed",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
