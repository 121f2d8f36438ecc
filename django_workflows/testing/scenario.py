"""One instance of one workflow, played in memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast

from django.utils import timezone

from django_workflows import outbox
from django_workflows.context import Effects, entered
from django_workflows.declarations import Step
from django_workflows.finding import Run, start_of
from django_workflows.instances import StateTable, key_of
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Lifecycle, WorkflowState
from django_workflows.notices import CommandFailed, JoinComplete
from django_workflows.testing.recording import Recorded, definition_of, delivery_with, record


@dataclass
class Waiting:
    """A message for the instance that falls due later."""

    message: Message
    due: datetime


@dataclass
class Scenario:
    """One instance of one workflow, played in memory: given a state, when messages, then ...

    `given` is the state of an instance that runs already; without it the first message must
    start one. What the last message led to is in `then`; the instance is `state`, and `noted`
    what would undo its steps. `advance` moves the clock on, and what the workflow has sent
    itself falls due. A command that failed is `when(failure_of(...))`, the end of a child
    `when(end_of(...))`.
    """

    workflow: Any
    given: WorkflowState | None = None
    now: datetime = field(default_factory=timezone.now)
    waiting: list[Waiting] = field(default_factory=list)
    noted: list[Message] = field(default_factory=list)
    then: Recorded = field(default_factory=lambda: Recorded(None, Effects()))

    def __post_init__(self) -> None:
        self.definition = definition_of(self.workflow)
        self.state: Any = self.given
        self._table = StateTable.of(outbox.database(), self.definition.state)
        self._arrived: dict[str, list[Message]] = defaultdict(list)
        self._joined: set[str] = set()

    def when(self, message: Message, **delivered: Any) -> Recorded:
        """Deliver a message; what its step asked for, which is nothing if it was ignored.

        `delivered` are `attempt`, `attributes` and `sticky_attributes`. Raises what the step
        raises, with the instance as it was before; and `AssertionError` for a message that the
        workflow has no step for. The message that completes a join runs the step of the join.
        """
        self.then = Recorded(None, Effects())
        step = self._step_for(message, delivery_with(**delivered))
        if step and step.join and not isinstance(message, JoinComplete):
            if step.name not in self._joined:
                self._arrived[step.name].append(message)
                self._complete_joins()
                joined = JoinComplete(step=step.name)
                if any(one.message == joined for one in self.waiting):
                    self.waiting = [one for one in self.waiting if one.message != joined]
                    self.when(joined)
        elif step:
            self._run(step, message, delivered)
        return self.then

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

    def _step_for(self, message: Message, delivery: Delivery) -> Step | None:
        step, start = self.definition.step_of(message), self.definition.start_of(message)
        if step is None and start is None:
            raise AssertionError(
                f"{self.definition.name} has no step for {type(message).__qualname__}."
            )
        if self.state is None:
            return start
        is_for_it = self.state.is_live and step and self._finds_it(step, message, delivery)
        return step if is_for_it else None

    def _finds_it(self, step: Step, message: Message, delivery: Delivery) -> bool:
        """Whether the step's lookup leads to the instance."""
        if step.lookup is None or not step.maps_to:
            return True
        key = key_of(step, message, delivery)
        if key is None or key == "":
            return False
        column: Any = self.state._meta.get_field(step.maps_to)
        value = getattr(self.state, column.attname)
        return bool(self._converted(step, key) == self._converted(step, value))

    def _converted(self, step: Step, value: Any) -> Any:
        return None if value is None else self._table.converted(cast("str", step.maps_to), value)

    def _run(self, step: Step, message: Message, delivered: dict[str, Any]) -> None:
        state = self._new_state(step, message, delivered) if step.starts else self.state
        before = self._table.snapshot(state)
        self.then = recorded = record(self.workflow, state, **delivered)
        try:
            with entered(recorded.context):
                self.definition.run(step, self._arguments(step, message), recorded.context)
            self._table.changed(state, before)  # which raises for what a step must not change
        except BaseException:
            self._put_back(state, before)
            raise
        if recorded.discarded:
            self._put_back(state, before)
        else:
            self.state = state
            self._keep(recorded.effects)
        self._wait_for_what_was_sent(recorded.effects)
        if self.state is not None:
            self._complete_joins()

    def _new_state(self, step: Step, message: Message, delivered: dict[str, Any]) -> Any:
        # Without a cursor, which only the search for another instance with its key would need.
        run = Run(
            cast("Any", None),
            delivery_with(**delivered),
            self.definition,
            message,
            self._table,
            conflicts=0,
            contested=False,
        )
        return cast("Any", start_of(run, step)).instance

    def _arguments(self, step: Step, message: Message) -> tuple[Any, ...]:
        match message:
            case CommandFailed():
                return from_json(step.about, message.body), message
            case JoinComplete() if step.join:
                return (step.join.counted(self._arrived[step.name]),)
        return (message,)

    def _put_back(self, state: WorkflowState, before: dict[str, Any]) -> None:
        for name, value in before.items():
            setattr(state, name, value)

    def _keep(self, effects: Effects) -> None:
        """Apply what the step asked for to the instance and to what waits."""
        self.noted += Recorded(None, effects).noted
        self.waiting = [
            one for one in self.waiting if one.message.stored_name() not in effects.cancelled
        ]
        if effects.ending:
            self.state.lifecycle = effects.ending
            self.waiting = []
        if effects.ending == Lifecycle.COMPENSATING and not self.noted:
            self.state.lifecycle = Lifecycle.COMPENSATED

    def _wait_for_what_was_sent(self, effects: Effects) -> None:
        """What the workflow has sent itself falls due, unless its instance has ended by that."""
        if self.state is None or (effects.ending and not effects.discarded):
            return
        for verb, message, terms in effects.asked:
            if verb == "send" and self.definition.step_of(message):
                due = terms.at or self.now + (terms.delay or timedelta(0))
                self.waiting.append(Waiting(message, due))

    def _complete_joins(self) -> None:
        """What starts the step of a join falls due at once, when all that it waits for is there."""
        for name, step in self.definition.joins.items():
            if step.join is None or name in self._joined or not self.state.is_live:
                continue
            needed = step.join.needed(self.state)
            if needed is not None and len(step.join.counted(self._arrived[name])) >= needed:
                self._joined.add(name)
                self.waiting.append(Waiting(JoinComplete(step=name), self.now))
