"""For tests of what is declared with django_workflows; every rule is the engine's own.

Without a database: `record` a handler or step that is called, or play a `Scenario`. With one, in
the test's own transaction, without broker or threads: `run_until_idle`, `advance`, `sent`,
`failed`. `isolated_registry` is for declarations that only one test knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID, uuid4

from django.utils import timezone

from django_workflows import clock, dispatch, outbox, registry
from django_workflows.context import Context, Effects, HandlerContext, entered
from django_workflows.declarations import Step, WorkflowDefinition
from django_workflows.instances import StateTable, key_of
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Lifecycle, Status, WorkflowState
from django_workflows.outbox import Origin, Terms
from django_workflows.registry import isolated as isolated_registry
from django_workflows.workflows import state_model

__all__ = [
    "Recorded",
    "Scenario",
    "advance",
    "failed",
    "isolated_registry",
    "moved_clock",
    "record",
    "run_until_idle",
    "sent",
]

M = TypeVar("M", bound=Message)


# Without a database


@dataclass
class Recorded:
    """What a handler or step has asked for. Its `context` is what it is called with.

    For a workflow that is a class, `context` is an object of it: call its steps.
    """

    context: Any
    effects: Effects

    @property
    def sent(self) -> list[Message]:
        """The commands that were sent, delayed ones too, in order."""
        return self._asked("send")

    @property
    def published(self) -> list[Message]:
        """The events that were published, in order."""
        return self._asked("publish")

    @property
    def replied(self) -> list[Message]:
        """The replies, in order."""
        return self._asked("reply")

    @property
    def noted(self) -> list[Message]:
        """The commands that would undo, in order."""
        return self._asked("compensate_with")

    @property
    def delays(self) -> dict[type[Message], timedelta | datetime | None]:
        """When what was sent is due, by the message's class."""
        return {type(message): terms.delay or terms.at for _verb, message, terms in self._all}

    @property
    def cancelled(self) -> set[str]:
        """The stored names of the messages that were cancelled."""
        return self.effects.cancelled

    @property
    def completed(self) -> bool:
        return self.effects.ending == Lifecycle.COMPLETED

    @property
    def compensating(self) -> bool:
        return self.effects.ending == Lifecycle.COMPENSATING

    @property
    def discarded(self) -> bool:
        return self.effects.discarded

    @property
    def _all(self) -> list[tuple[str, Message, Terms]]:
        return self.effects.asked

    def _asked(self, verb: str) -> list[Message]:
        return [message for asked, message, _terms in self._all if asked == verb]


def record(
    workflow: Any = None,
    state: WorkflowState | None = None,
    *,
    attempt: int = 1,
    attributes: dict[str, Any] | None = None,
    sticky_attributes: dict[str, Any] | None = None,
) -> Recorded:
    """A context that records, for calling a step of this workflow, or a plain handler.

    `workflow` is its class or its `define_workflow`, `state` an instance that need not be saved;
    without them the context is a plain handler's. No database is touched, and a reply always has
    somebody to go to.
    """
    delivery = Delivery(
        message_id=uuid4(),
        correlation_id=uuid4(),
        attempts=attempt - 1,
        attributes=attributes or {},
        sticky_attributes=sticky_attributes or {},
    )
    effects = Effects()
    context: Context
    if workflow is None:
        context = HandlerContext(delivery, Origin(), effects)
    else:
        definition = _definition(workflow)
        state = state if state is not None else definition.state()
        context = definition.context_class(delivery, Origin(), effects, state, definition)
    cast("Any", context).reply = partial(_record_reply, effects)
    return Recorded(context, effects)


def _record_reply(effects: Effects, message: Message, **options: Any) -> UUID:
    effects.asked.append(("reply", message, Terms(**options)))
    return uuid4()


@dataclass
class Waiting:
    """A command that the workflow has sent itself, for later."""

    message: Message
    due: datetime


@dataclass
class Scenario:
    """One instance of one workflow, played in memory: given a state, when messages, then ...

    `given` is the state of an instance that runs already; without it the first message must
    start one. What the last message led to is in `then`; the instance is `state`. `advance`
    moves the clock on, and what the workflow has sent itself falls due.
    """

    workflow: Any
    given: WorkflowState | None = None
    now: datetime = field(default_factory=timezone.now)
    waiting: list[Waiting] = field(default_factory=list)
    then: Recorded = field(default_factory=lambda: Recorded(None, Effects()))

    def __post_init__(self) -> None:
        self.definition = _definition(self.workflow)
        self.state = self.given

    def when(self, message: Message, **delivered: Any) -> Recorded:
        """Deliver a message; what its step asked for, which is nothing if it was ignored.

        `delivered` are `attempt`, `attributes` and `sticky_attributes`. Raises what the step
        raises, with nothing changed that outlives it but what it did to `state` in place.
        """
        self.then = Recorded(None, Effects())
        step = self._step_for(message)
        if step is None:
            return self.then
        state = self._new_state(step, message) if step.starts else cast("WorkflowState", self.state)
        recorded = record(self.workflow, state, **delivered)
        with entered(recorded.context):
            self.definition.run(step, (message,), recorded.context)
        self.then = recorded
        self._keep(step, state, recorded)
        return recorded

    def advance(self, by: timedelta) -> list[Recorded]:
        """Move the clock on; what falls due is delivered in its order, and returned."""
        until = self.now + by
        delivered = []
        while due := [one for one in self.waiting if one.due <= until]:
            first = min(due, key=lambda one: one.due)
            self.waiting.remove(first)
            self.now = max(self.now, first.due)
            delivered.append(self.when(first.message))
        self.now = until
        return delivered

    @property
    def lifecycle(self) -> str | None:
        """The instance's lifecycle; None when there is no instance."""
        return str(self.state.lifecycle) if self.state is not None else None

    def _step_for(self, message: Message) -> Step | None:
        if self.state is not None and self.state.is_live:
            if step := self.definition.step_of(message):
                return step
            return None
        return self.definition.start_of(message) if self.state is None else None

    def _new_state(self, step: Step, message: Message) -> WorkflowState:
        state = self.definition.state()
        if step.maps_to:
            table = StateTable.of(outbox.database(), self.definition.state)
            column: Any = state._meta.get_field(step.maps_to)
            delivery = Delivery(attributes={}, sticky_attributes={})
            key = table.converted(step.maps_to, key_of(step, message, delivery))
            setattr(state, column.attname, key)
        return state

    def _keep(self, step: Step, state: WorkflowState, recorded: Recorded) -> None:
        """Apply what the step asked for to the instance and to what waits."""
        effects = recorded.effects
        if effects.discarded:
            return
        self.state = state
        self.waiting = [
            one for one in self.waiting if one.message.stored_name() not in effects.cancelled
        ]
        for verb, message, terms in effects.asked:
            if verb == "send" and self.definition.step_of(message):
                due = terms.at or self.now + (terms.delay or timedelta(0))
                self.waiting.append(Waiting(message, due))
        if effects.ending:
            state.lifecycle = effects.ending
            self.waiting = []


def _definition(workflow: Any) -> WorkflowDefinition:
    state = state_model(workflow)
    return next(d for d in registry.current().workflows if d.state is state)


# With a database


def run_until_idle(*, limit: int = 1000) -> int:
    """Handle what is due, and what that leads to, until nothing is; how many deliveries that were.

    In this thread and in the test's own transaction, oldest due first. What fails waits for its
    backoff: see `failed`, and `advance`. Raises `AssertionError` after `limit` deliveries, since
    messages that send each other would never end.
    """
    count = 0
    while due := _next_due():
        if count == limit:
            raise AssertionError(
                f"{limit} deliveries were handled and there is more, next {due}. Do messages send "
                f"each other for ever? Otherwise raise limit=."
            )
        dispatch.deliver(due.pk)
        count += 1
    return count


def advance(by: timedelta) -> int:
    """Move the engine's clock on step by step to what falls due, handling it; how many that were.

    Inside `moved_clock` (the pytest fixture `workflows`) the clock is put back at the end.
    """
    until = clock.read(outbox.database()) + by
    count = run_until_idle()
    while (next_due := _pending().order_by("due_at").first()) and next_due.due_at <= until:
        clock.offset += max(next_due.due_at - clock.read(outbox.database()), timedelta(0))
        clock.offset += timedelta(microseconds=1)
        count += run_until_idle()
    clock.offset += max(until - clock.read(outbox.database()), timedelta(0))
    return count + run_until_idle()


def sent(message_class: type[M]) -> list[M]:
    """The messages of this class that were sent or published, oldest first, each once."""
    rows = (
        Delivery.objects.filter(message_name__in=message_class.stored_names())
        .order_by("pk")
        .values_list("message_id", "body")
    )
    return [cast("M", from_json(message_class, body)) for body in dict(rows).values()]


def failed() -> list[Delivery]:
    """The deliveries whose last attempt has failed, whether they will be retried or not."""
    return list(Delivery.objects.exclude(error="").exclude(status=Status.HANDLED).order_by("pk"))


@contextmanager
def moved_clock() -> Iterator[None]:
    """Put the engine's clock back at the end of the block, and hand nothing to a broker in it."""
    transport, outbox.transport = outbox.transport, outbox.NoTransport()
    try:
        yield
    finally:
        clock.offset = timedelta(0)
        outbox.transport = transport


def _pending() -> Any:
    return Delivery.objects.filter(status=Status.PENDING)


def _next_due() -> Delivery | None:
    found = _pending().filter(due_at__lte=clock.read(outbox.database())).order_by("due_at", "pk")
    return cast("Delivery | None", found.first())
