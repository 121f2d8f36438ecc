"""A process that is a straight line with undo: an ordered list, which expands to ordinary steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django_workflows.context import WorkflowContext
from django_workflows.declarations import Step
from django_workflows.errors import DeclarationError
from django_workflows.messages import Command, Event, Message
from django_workflows.notices import CommandFailed

Fill = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class stage:  # noqa: N801  reads as a word in `line(...)`
    """A command, the event or reply that ends it, and the command that would undo it.

    The commands' fields are filled from the state's fields of the same names, or by `fill` and
    `undo_fill`: functions of the state that return the values by name.
    """

    command: type[Command]
    until: type[Message]
    undo: type[Command] | None = None
    fill: Fill | None = None
    undo_fill: Fill | None = None


class line:  # noqa: N801  reads as a word in a class's body
    """The stages of a process, one after the other: `line(OrderPlaced, stage(...), stage(...))`.

    In a workflow's class it is an attribute; in functions, `workflow.line(...)`. The event
    starts an instance (`once_per` as for `started_by`) and the first command is sent; each
    stage's `until` notes the undo command and sends the next; the last one completes the
    instance. Fields of these messages are copied into the state's fields of the same names. A
    command that fails for good makes the instance compensate. It expands to ordinary steps, and
    others can be added by hand.
    """

    def __init__(
        self, started_by: type[Event], *stages: stage, once_per: str | None = None
    ) -> None:
        if not stages:
            raise DeclarationError(
                f"A line that starts with {started_by.__qualname__} has no stages. Give it one."
            )
        self.started_by = started_by
        self.stages = stages
        self.once_per = once_per

    def steps(self, *, of_class: bool) -> list[Step]:
        """The steps that the line stands for, as methods of a class or as functions."""
        followers: list[stage | None] = [*self.stages[1:], None]
        start = self._step("start", self.started_by, _sends(self.stages[0]), of_class)
        found = [
            Step(
                start.message,
                start.function,
                starts=True,
                lookup=self.once_per,
                maps_to=self.once_per,
            )
        ]
        for one, following in zip(self.stages, followers, strict=True):
            done = self._step("after", one.until, _ends(one, following), of_class, one.command)
            gone = self._step("undo_after", CommandFailed, _undo, of_class, one.command)
            found += [done, Step(gone.message, gone.function, about=one.command)]
        return found

    def _step(
        self,
        name: str,
        message: type[Message],
        act: Callable[[Message, WorkflowContext[Any]], None],
        of_class: bool,
        command: type[Command] | None = None,
    ) -> Step:
        """A step that calls `act`, in the shape that the workflow's other steps have."""

        def method(context: WorkflowContext[Any], *arguments: Any) -> None:
            act(arguments[0], context)

        def function(*arguments: Any) -> None:
            act(arguments[0], arguments[-1])

        step = method if of_class else function
        step.__name__ = f"{name}_{_snake((command or message).__name__)}"
        return Step(message, step)


def _sends(one: stage) -> Callable[[Message, WorkflowContext[Any]], None]:
    def act(message: Message, context: WorkflowContext[Any]) -> None:
        _copy(message, context.state)
        context.send(_filled(one.command, one.fill, context.state))

    return act


def _ends(one: stage, following: stage | None) -> Callable[[Message, WorkflowContext[Any]], None]:
    def act(message: Message, context: WorkflowContext[Any]) -> None:
        _copy(message, context.state)
        if one.undo:
            context.compensate_with(_filled(one.undo, one.undo_fill, context.state))
        if following:
            context.send(_filled(following.command, following.fill, context.state))
        else:
            context.complete()

    return act


def _undo(_command: Message, context: WorkflowContext[Any]) -> None:
    context.compensate()


def _copy(message: Message, state: Any) -> None:
    """Keep what the message says in the state's fields of the same names."""
    fields = {field.name for field in state._meta.concrete_fields if field.editable}
    for name in fields & set(type(message).model_fields):
        setattr(state, name, getattr(message, name))


def _filled(command: type[Command], fill: Fill | None, state: Any) -> Command:
    values = fill(state) if fill else {n: getattr(state, n) for n in _names(command, state)}
    return command(**values)


def _names(command: type[Command], state: Any) -> Sequence[str]:
    return [name for name in command.model_fields if hasattr(state, name)]


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
