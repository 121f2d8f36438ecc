"""What a user declares: a workflow as a class, or as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast, get_args, get_origin

from django_workflows import registry
from django_workflows.context import WorkflowContext
from django_workflows.errors import DeclarationError
from django_workflows.messages import Message
from django_workflows.models import WorkflowState
from django_workflows.registry import IfMissing, Lookup, Step, WorkflowDefinition

S = TypeVar("S", bound=WorkflowState)
M = TypeVar("M", bound=Message)
F = TypeVar("F", bound=Callable[..., None])


def started_by(
    message: type[M],
    *,
    once_per: str | None = None,
    lookup: Lookup | None = None,
    unrecoverable: Iterable[type[BaseException]] = (),
) -> Callable[[F], F]:
    """Let the decorated step create an instance when this message arrives.

    `once_per` names a unique field of the state: the engine fills it from the message's field
    of that name (or from `lookup`) before the step runs, and a second message with the same
    value starts nothing, ever. The constraint decides, so a race of two workers is safe.
    """
    return _mark(
        message,
        starts=True,
        lookup=lookup if lookup is not None else once_per,
        maps_to=once_per,
        if_missing="ignore",
        unrecoverable=tuple(unrecoverable),
    )


def when(
    message: type[M],
    *,
    lookup: Lookup | None = None,
    maps_to: str | None = None,
    if_missing: IfMissing = "ignore",
    unrecoverable: Iterable[type[BaseException]] = (),
) -> Callable[[F], F]:
    """Let the decorated step continue an instance when this message arrives.

    The instance is the one whose field `maps_to` equals the value of `lookup`: a field of the
    message, a function of it, or `attribute("key")`. `maps_to` may be left out when both have
    one name. Without `lookup` it is the instance whose workflow id travelled along. Several
    matching instances get one delivery each. A value of None or '' matches nothing.

    `if_missing` says what becomes of a message that matches no instance: "ignore" (with a
    warning and a row that says so), "retry" (as a failure) or "fail" (at once, visible).
    """
    return _mark(
        message,
        starts=False,
        lookup=lookup,
        maps_to=maps_to or (lookup if isinstance(lookup, str) else None),
        if_missing=if_missing,
        unrecoverable=tuple(unrecoverable),
    )


class Workflow(WorkflowContext[S], Generic[S]):
    """The base of a workflow that is declared as a class: `class Fulfilment(Workflow[State])`.

    An object of it lives for one step; its `state` is the instance's row, and what it offers
    (`send`, `publish`, `reply`, `cancel`, `complete`, `discard`) is that of `WorkflowContext`.
    `queue="slow"` in the class statement keeps its deliveries on a queue of their own.
    """

    def __init_subclass__(cls, *, queue: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        state = _state_of(cls)
        if state is None:  # an abstract base, as Workflow itself
            return
        definition = WorkflowDefinition(state, cls, queue)
        for function in _step_functions(cls):
            if hasattr(Workflow, function.__name__):
                raise DeclarationError(
                    f"The step {cls.__qualname__}.{function.__name__} hides a name of Workflow. "
                    f"Give the step another name."
                )
            definition.steps.extend(_steps_of(function))
        registry.current().add(definition)


class FunctionWorkflow(Generic[S]):
    """A workflow whose steps are functions `(message, state, context)`; see `define_workflow`."""

    def __init__(self, definition: WorkflowDefinition) -> None:
        self.definition = definition

    def started_by(self, message: type[M], **options: Any) -> Callable[[F], F]:
        """As `started_by` for classes, with the same options."""
        return self._add(started_by(message, **options))

    def when(self, message: type[M], **options: Any) -> Callable[[F], F]:
        """As `when` for classes, with the same options."""
        return self._add(when(message, **options))

    def _add(self, mark: Callable[[F], F]) -> Callable[[F], F]:
        def add(function: F) -> F:
            before = len(_steps_of(function))
            self.definition.steps.extend(_steps_of(mark(function))[before:])
            registry.current().changed()
            return function

        return add


def define_workflow(state: type[S], *, queue: str | None = None) -> FunctionWorkflow[S]:
    """Declare a workflow on this state; add steps with its `started_by` and `when`."""
    definition = WorkflowDefinition(state, WorkflowContext, queue)
    registry.current().add(definition)
    return FunctionWorkflow(definition)


_STEPS = "_django_workflows_steps"


def _mark(message: type[Message], **options: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        steps = (*_steps_of(function), Step(message=message, function=function, **options))
        setattr(function, _STEPS, steps)
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
