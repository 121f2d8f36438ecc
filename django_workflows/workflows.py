"""What a user declares: a workflow as a class, or as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, Unpack, cast, get_args, get_origin

from django_workflows import registry
from django_workflows.context import WorkflowContext
from django_workflows.declarations import (
    IfMissing,
    Join,
    Lookup,
    Recovery,
    RecoveryOptions,
    Step,
    WorkflowDefinition,
    require_parentheses,
)
from django_workflows.errors import DeclarationError
from django_workflows.lines import line, stage
from django_workflows.messages import Command, Event, Message
from django_workflows.models import WorkflowState
from django_workflows.notices import CommandFailed, JoinComplete, WorkflowEnded

S = TypeVar("S", bound=WorkflowState)
M = TypeVar("M", bound=Message)
F = TypeVar("F", bound=Callable[..., None])


def started_by(
    message: type[M],
    *,
    once_per: str | None = None,
    lookup: Lookup | None = None,
    **recovery: Unpack[RecoveryOptions],
) -> Callable[[F], F]:
    """Let the decorated step create an instance when this message arrives.

    `once_per` names a unique field of the state: the engine fills it from the message's field
    of that name (or from `lookup`) before the step runs, and a second message with the same
    value starts nothing, ever. The constraint decides, so a race of two workers is safe.
    """
    require_parentheses(message, "@started_by")
    return _mark(
        message,
        starts=True,
        lookup=lookup if lookup is not None else once_per,
        maps_to=once_per,
        recovery=Recovery.of(recovery, "@started_by", "once_per", "lookup"),
    )


def when(
    message: type[M],
    *,
    lookup: Lookup | None = None,
    maps_to: str | None = None,
    if_missing: IfMissing = "ignore",
    **recovery: Unpack[RecoveryOptions],
) -> Callable[[F], F]:
    """Let the decorated step continue an instance when this message arrives.

    The instance is the one whose field `maps_to` equals the value of `lookup`: a field of the
    message, a function of it, or `attribute("key")`. `maps_to` may be left out when both have
    one name. Without `lookup` it is the instance whose workflow id travelled along. Several
    matching instances get one delivery each. A value of None or '' matches nothing.

    `if_missing` says what becomes of a message that matches no instance: "ignore" (with a
    warning and a row that says so), "retry" (as a failure), "fail" (at once, visible), or
    "wait": it is parked and handled as soon as an instance with that key is created. The wait
    ends after WAIT_LIMIT, or as `wait(timedelta(hours=1), then="fail")` says.
    """
    require_parentheses(message, "@when")
    return _mark(
        message,
        lookup=lookup,
        maps_to=maps_to or (lookup if isinstance(lookup, str) else None),
        if_missing=if_missing,
        recovery=Recovery.of(recovery, "@when", "lookup", "maps_to", "if_missing"),
    )


def when_all(
    *messages: type[Message],
    count: int | str | Callable[[Any], int] | None = None,
    distinct: str | None = None,
    name: str | None = None,
    lookup: Lookup | None = None,
    maps_to: str | None = None,
    if_missing: IfMissing = "ignore",
    **recovery: Unpack[RecoveryOptions],
) -> Callable[[F], F]:
    """Let the decorated step run once, when all of several messages have arrived; a join.

    It is called with the list of them, oldest first. They are one of each of `messages`; with
    `count` (a number, a field of the state, or a function of it) so many in all. With `distinct`,
    a field of the messages, those that have the same value count once. An arrival is recorded
    without touching the instance, so a thousand at once are no conflict. What arrives after the
    join is complete is ignored. The instance is found as for `when`. Arrivals are stored under
    the function's name: give the old one as `name` when you rename it.
    """
    for message in messages:
        require_parentheses(message, "@when_all")
    options = ("count", "distinct", "name", "lookup", "maps_to", "if_missing")
    declared = Recovery.of(recovery, "@when_all", *options)
    join = Join(messages, count, distinct, name)
    marks = [
        _mark(
            message,
            lookup=lookup,
            maps_to=maps_to or (lookup if isinstance(lookup, str) else None),
            if_missing=if_missing,
            recovery=declared,
            join=join,
        )
        for message in messages
    ]
    return _all_of(*marks, _mark(JoinComplete, recovery=declared, join=join))


def on_failure(command: type[Command], **recovery: Unpack[RecoveryOptions]) -> Callable[[F], F]:
    """Let the decorated step run when a command that this instance sent has failed for good.

    It is called with the command and a `CommandFailed`, once for each failure, in a delivery of
    its own. Without such a step the failure stays visible on the instance.
    """
    require_parentheses(command, "@on_failure")
    return _mark(CommandFailed, about=command, recovery=Recovery.of(recovery, "@on_failure"))


def when_completed(
    child: type[Any] | FunctionWorkflow[Any], **recovery: Unpack[RecoveryOptions]
) -> Callable[[F], F]:
    """Let the decorated step run when an instance of another workflow that this one started ends.

    `child` is its class, its `define_workflow`, or its state. The step is called with a
    `WorkflowEnded`, whose `outcome` is completed, compensated or cancelled.
    """
    require_parentheses(child, "@when_completed")
    declared = Recovery.of(recovery, "@when_completed")
    return _mark(WorkflowEnded, about=state_model(child), recovery=declared)


class Workflow(WorkflowContext[S], Generic[S]):
    """The base of a workflow that is declared as a class: `class Fulfilment(Workflow[State])`.

    An object of it lives for one step; its `state` is the instance's row, and what it offers
    (`send`, `publish`, `reply`, `cancel`, `complete`, ...) is that of `WorkflowContext`. In the
    class statement, `queue="slow"` keeps its deliveries on a queue of their own, and `attempts`,
    `backoff` and `unrecoverable` are for its steps.
    """

    def __init_subclass__(
        cls, *, queue: str | None = None, **recovery: Unpack[RecoveryOptions]
    ) -> None:
        super().__init_subclass__()
        declared = Recovery.of(recovery, f"class {cls.__name__}", "queue")
        state = _state_of(cls)
        if state is None:  # a base for others, or the state was forgotten, which a check finds
            if _step_functions(cls) or _lines(cls):
                registry.current().stateless.append(cls)
            return
        definition = WorkflowDefinition(state, cls, queue, declared)
        for function in _step_functions(cls):
            if hasattr(Workflow, function.__name__):
                raise DeclarationError(
                    f"The step {cls.__qualname__}.{function.__name__} hides a name of Workflow. "
                    f"Give the step another name."
                )
            definition.steps.extend(_steps_of(function))
        for one in _lines(cls):
            definition.steps.extend(one.steps(of_class=True))
        registry.current().add(definition)


class FunctionWorkflow(Generic[S]):
    """A workflow whose steps are functions `(message, state, context)`; see `define_workflow`.

    Its decorators have the options of the functions of the same names.
    """

    def __init__(self, definition: WorkflowDefinition) -> None:
        self.definition = definition

    def started_by(self, message: type[M], **options: Any) -> Callable[[F], F]:
        return self._add(started_by(message, **options))

    def when(self, message: type[M], **options: Any) -> Callable[[F], F]:
        return self._add(when(message, **options))

    def when_all(self, *messages: type[Message], **options: Any) -> Callable[[F], F]:
        return self._add(when_all(*messages, **options))

    def on_failure(self, command: type[Command], **options: Any) -> Callable[[F], F]:
        return self._add(on_failure(command, **options))

    def when_completed(self, child: Any, **options: Any) -> Callable[[F], F]:
        return self._add(when_completed(child, **options))

    def line(self, started_by: type[Event], *stages: stage, once_per: str | None = None) -> None:
        """Add the steps of a straight line; see `line`."""
        self.definition.steps.extend(
            line(started_by, *stages, once_per=once_per).steps(of_class=False)
        )
        registry.current().changed()

    def _add(self, mark: Callable[[F], F]) -> Callable[[F], F]:
        def add(function: F) -> F:
            before = len(_steps_of(function))
            self.definition.steps.extend(_steps_of(mark(function))[before:])
            registry.current().changed()
            return function

        return add


def define_workflow(
    state: type[S], *, queue: str | None = None, **recovery: Unpack[RecoveryOptions]
) -> FunctionWorkflow[S]:
    """Declare a workflow on this state; add steps with its `started_by`, `when` and the others."""
    declared = Recovery.of(recovery, "define_workflow()", "queue")
    definition = WorkflowDefinition(state, WorkflowContext, queue, declared)
    registry.current().add(definition)
    return FunctionWorkflow(definition)


_STEPS = "_django_workflows_steps"


def _mark(message: type[Message], **options: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        steps = (*_steps_of(function), Step(message=message, function=function, **options))
        setattr(function, _STEPS, steps)
        return function

    return mark


def _all_of(*marks: Callable[[F], F]) -> Callable[[F], F]:
    def mark(function: F) -> F:
        for one in marks:
            one(function)
        return function

    return mark


def _steps_of(function: Any) -> tuple[Step, ...]:
    return cast("tuple[Step, ...]", getattr(function, _STEPS, ()))


def _step_functions(cls: type) -> list[Callable[..., None]]:
    """The class's steps and those of its bases, in the order of declaration."""
    found = {
        name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()
    }  # a subclass's own attribute replaces the inherited one in place
    return [value for value in found.values() if _steps_of(value)]


def _lines(cls: type) -> list[line]:
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return [value for value in found.values() if isinstance(value, line)]


def _state_of(cls: type) -> type[WorkflowState] | None:
    """The state in `Workflow[State]`, of this class or of the nearest base that names one."""
    for klass in cls.__mro__:
        for base in vars(klass).get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Workflow):
                for argument in get_args(base):
                    if isinstance(argument, type) and issubclass(argument, WorkflowState):
                        return argument
    return None


def state_model(workflow: Any) -> type[WorkflowState]:
    if isinstance(workflow, FunctionWorkflow):
        return workflow.definition.state
    if isinstance(workflow, type) and issubclass(workflow, WorkflowState):
        return workflow
    state = _state_of(workflow) if isinstance(workflow, type) else None
    if state is None:
        raise DeclarationError(
            f"{workflow!r} is not a workflow. Pass its class, its define_workflow(), or its state."
        )
    return state
