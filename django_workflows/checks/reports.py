"""How a check says what is wrong: the class, the rule, and the remedy as the hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Warning

from django_workflows import registry
from django_workflows.declarations import Handler, Recipient, Step, WorkflowDefinition
from django_workflows.errors import DeclarationError
from django_workflows.messages import Command, Event, Message

Problems = Iterator[CheckMessage]


def error(number: int, text: str, hint: str, obj: Any = None) -> Error:
    return Error(text, hint=hint, obj=obj, id=f"django_workflows.E{number:03}")


def warning(number: int, text: str, hint: str, obj: Any = None) -> Warning:
    return Warning(text, hint=hint, obj=obj, id=f"django_workflows.W{number:03}")


def path(declared: type | Callable[..., Any]) -> str:
    """Where it stands, as a dotted name; what is wrapped in a partial and the like has none."""
    name = getattr(declared, "__qualname__", None) or repr(declared)
    return f"{declared.__module__}.{name}"


def place(recipient: Recipient) -> str:
    """The handler's function, or the workflow's class, as a dotted name."""
    if isinstance(recipient, Handler):
        return path(recipient.function)
    if recipient.is_class:
        return path(recipient.context_class)
    return f"define_workflow({path(recipient.state)})"


def place_of_step(workflow: WorkflowDefinition, step: Step) -> str:
    if workflow.is_class:
        return f"{path(workflow.context_class)}.{step.name}"
    return path(step.function)


def steps() -> Iterator[tuple[WorkflowDefinition, Step]]:
    """Every step of every workflow."""
    for workflow in registry.current().workflows:
        for step in workflow.steps:
            yield workflow, step


def messages() -> list[type[Message]]:
    """Every message that something reacts to."""
    recipients = registry.current().recipients
    named = (message for recipient in recipients for message in recipient.messages)
    return [message for message in dict.fromkeys(named) if is_message(message)]


def is_message(declared: Any) -> bool:
    """Whether it is a message that can be sent; the bases are not."""
    return (
        isinstance(declared, type)
        and issubclass(declared, Command | Event)
        and declared not in (Command, Event)
    )


def names_of(declared: Recipient | type[Message]) -> tuple[str, ...]:
    """The stored name and the aliases; none if it has no name, which a check of its own says."""
    try:
        if isinstance(declared, Handler | WorkflowDefinition):
            return (declared.name, *declared.aliases)
        return declared.stored_names()
    except DeclarationError:
        return ()
