"""What a handler or step may ask for, and the context that is current on this thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypedDict, TypeVar, Unpack, cast
from uuid import UUID

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_workflows import logs, observing, outbox, registry, statements
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import MessageError, NobodyAsked, Unrecoverable
from django_workflows.messages import Command, Event, Message
from django_workflows.models import Delivery, Lifecycle, WorkflowState
from django_workflows.outbox import Origin, Terms
from django_workflows.statements import NewDelivery

if TYPE_CHECKING:
    from collections.abc import Iterator

S = TypeVar("S", bound=WorkflowState)


class SendOptions(TypedDict, total=False):
    """How a message is sent.

    `delay` (a timedelta) or `at` (an aware datetime; one that has passed means now) let the
    delivery wait in the table. `attributes` travel with this message, `sticky_attributes` with
    it and everything it causes; both are JSON objects. `idempotency_key` (a text of the outside
    world's, for this kind of message) or `message_id` makes a message that is sent twice one
    message, for as long as its deliveries are kept.
    """

    delay: timedelta | None
    at: datetime | None
    attributes: Mapping[str, Any] | None
    sticky_attributes: Mapping[str, Any] | None
    message_id: UUID | None
    idempotency_key: str | None


class AttributeOptions(TypedDict, total=False):
    """What may travel with a message."""

    attributes: Mapping[str, Any] | None
    sticky_attributes: Mapping[str, Any] | None


@dataclass
class Effects:
    """What a run has asked for, carried out at its end."""

    #: Each message with the verb it was sent by and its terms, in order; for tests to read.
    asked: list[tuple[str, Message, Terms]] = field(default_factory=list)
    outgoing: list[NewDelivery] = field(default_factory=list)
    #: Ids of all that was sent, whether it is still to be written or not, and the messages' names.
    sent: dict[UUID, str] = field(default_factory=dict)
    #: Names of the messages of which what waits is cancelled.
    cancelled: set[str] = field(default_factory=set)
    #: Undo commands, kept with the instance until it compensates.
    notes: list[NewDelivery] = field(default_factory=list)
    #: Ids of those that are in the table already.
    noted: list[UUID] = field(default_factory=list)
    #: COMPLETED or COMPENSATING, when the step has asked for that.
    ending: Lifecycle | None = None
    discarded: bool = False
    #: Whether something was done at once that the version has to move on for.
    acted: bool = False

    @property
    def has_any(self) -> bool:
        """Whether the run did anything but change fields."""
        return bool(
            self.sent or self.cancelled or self.notes or self.noted or self.ending or self.acted
        )


class Context:
    """What handlers and steps have in common. An object of it lives for one run."""

    def __init__(self, delivery: Delivery, origin: Origin, effects: Effects) -> None:
        self._delivery = delivery
        self._origin = origin
        self._effects = effects
        #: The open transactions at the start of the run: none, if the handler is not atomic.
        self._connection = outbox.database()
        self._depth = _depth(self._connection)

    @property
    def delivery_id(self) -> UUID:
        """The same for every attempt: the idempotency key for outside services."""
        return self._delivery.id

    @property
    def message_id(self) -> UUID:
        """Shared by all deliveries of this message."""
        return self._delivery.message_id

    @property
    def correlation_id(self) -> UUID:
        """Shared by the whole conversation."""
        return self._delivery.correlation_id

    @property
    def causation_id(self) -> UUID | None:
        """The message that caused this one."""
        return self._delivery.causation_id

    @property
    def attempt(self) -> int:
        """1 for the first run, one more after each failure; conflicts do not count."""
        return self._delivery.attempts + 1

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What was sent along with this message."""
        return cast("Mapping[str, Any]", self._delivery.attributes)

    @property
    def sticky_attributes(self) -> Mapping[str, Any]:
        """What travels with this message and everything it causes."""
        return cast("Mapping[str, Any]", self._delivery.sticky_attributes)

    def send(self, *commands: Command, **options: Unpack[SendOptions]) -> list[UUID]:
        """Send commands, each to its one handler; the ids of the messages.

        They leave when this run commits. Raises `WrongVerb` for an event and `NoHandler` for a
        command that nothing handles.
        """
        outbox.require_commands(commands)
        return self._prepare("send", commands, Terms.of("send", options))

    def publish(self, *events: Event, **options: Unpack[SendOptions]) -> list[UUID]:
        """Publish events to whatever reacts to them; the ids of the messages."""
        outbox.require_events(events)
        return self._prepare("publish", events, Terms.of("publish", options))

    def reply(self, message: Message, **options: Unpack[SendOptions]) -> UUID:
        """Send a message to the one instance that asked, whoever else reacts to it.

        That is the instance that sent the message being handled; in a step that no other
        workflow sent a command to, the instance that started this one. Raises `NobodyAsked`.
        """
        terms = Terms.of("reply", options)
        asker, instance_id = self._asker()
        definition = registry.current().recipient(asker)
        if not isinstance(definition, WorkflowDefinition) or not definition.step_of(message):
            raise MessageError(
                f"{asker} asked, but has no step @when({type(message).__name__}) for the reply. "
                f"Add one, or publish the event instead."
            )
        message_id, delivery = outbox.prepare_reply(
            message, self._origin, terms, definition, instance_id
        )
        self._effects.asked.append(("reply", message, terms))
        self._add([delivery])
        return message_id

    def fail(self, reason: str) -> NoReturn:
        """Fail the delivery for good, with this reason; nothing that the run did is committed."""
        raise Unrecoverable(reason)

    def _facts(self) -> dict[str, Any]:
        """What log records say while this runs."""
        return observing.facts_of(self._delivery)

    def _asker(self) -> tuple[str, UUID]:
        if self._delivery.sender_instance_id is None:
            raise NobodyAsked(
                f"{self._delivery.message_name} was not sent by a workflow, so there is nobody to "
                f"reply to. Publish an event instead."
            )
        return self._delivery.sender, self._delivery.sender_instance_id

    def _prepare(self, verb: str, messages: Sequence[Message], terms: Terms) -> list[UUID]:
        ids, deliveries = outbox.prepare(messages, self._origin, terms)
        self._effects.asked += [(verb, message, terms) for message in messages]
        self._add(deliveries)
        return ids

    def _add(self, deliveries: list[NewDelivery]) -> None:
        """Keep them for the end of the run, unless a savepoint must be able to drop them."""
        self._effects.sent.update({new.id: new.message_name for new in deliveries})
        if _depth(self._connection) == self._depth:
            self._effects.outgoing += deliveries
        elif self._depth:
            with self._connection.cursor() as cursor:
                outbox.write(cursor, deliveries)
        else:
            # The handler is not atomic, and this waits for a transaction that it has opened.
            transaction.on_commit(
                partial(self._effects.outgoing.extend, deliveries), using=self._connection.alias
            )


class HandlerContext(Context):
    """The second argument of a plain handler."""


class WorkflowContext(Context, Generic[S]):
    """The third argument of a step that is a function, and the base of `Workflow`."""

    def __init__(
        self,
        delivery: Delivery,
        origin: Origin,
        effects: Effects,
        state: S,
        definition: WorkflowDefinition,
    ) -> None:
        super().__init__(delivery, origin, effects)
        self.state = state
        self._definition = definition

    @property
    def workflow_id(self) -> UUID:
        """The id of this instance."""
        return self.state.pk

    def _facts(self) -> dict[str, Any]:
        return observing.facts_of(self._delivery, self.state.pk)

    def send_again(self, command: Command, **options: Unpack[SendOptions]) -> list[UUID]:
        """Send a command and cancel what waits of its kind: it replaces a timeout."""
        self.cancel(type(command))
        return self.send(command, **options)

    def cancel(self, *messages: type[Command]) -> None:
        """Cancel what this instance has waiting of these commands that it sent itself.

        One that is being handled at this moment is cancelled too: it will have had no effect.
        """
        names = {name for message in messages for name in message.stored_names()}
        effects, own = self._effects, self._definition.name
        if _depth(self._connection) != self._depth:
            self._cancel_at_once(names)
            return
        effects.cancelled |= names
        for sent in [id for id, name in effects.sent.items() if name in names]:
            del effects.sent[sent]
        effects.outgoing[:] = [
            new for new in effects.outgoing if new.message_name not in names or new.handler != own
        ]
        if names & {name for one in self._definition.messages for name in one.stored_names()}:
            effects.asked[:] = [
                (verb, message, terms)
                for verb, message, terms in effects.asked
                if verb != "send" or message.stored_name() not in names
            ]

    def _cancel_at_once(self, names: set[str]) -> None:
        """Cancel in a block of the step's own, whose rollback must be able to undo that."""
        effects, own = self._effects, self._definition.name
        if any(new.message_name in names and new.handler == own for new in effects.outgoing):
            raise MessageError(
                f"{', '.join(sorted(names))} was sent by this step outside of the atomic() block "
                f"in which it is cancelled. Cancel it outside, too."
            )
        with self._connection.cursor() as cursor:
            statements.cancel(
                cursor,
                workflows=self._definition.names,
                instance_id=self.state.pk,
                names=sorted(names),
                kept=[self._delivery.id],
                reason=f"Cancelled by {own}.",
            )
        effects.acted = True

    def complete(self) -> None:
        """End the instance with this step's changes, and cancel what it has waiting for itself.

        One that is compensating is left to that, and ends as compensated.
        """
        compensating = (self.state.lifecycle, self._effects.ending)
        if Lifecycle.COMPENSATING not in compensating:
            self._effects.ending = Lifecycle.COMPLETED

    def compensate_with(self, command: Command, **options: Unpack[AttributeOptions]) -> None:
        """Note the command that undoes what this step does; it commits with the step.

        It is kept with the instance and is sent when the instance compensates.
        """
        outbox.require_commands([command])
        terms = Terms.of("compensate_with", options, AttributeOptions.__annotations__)
        _ids, notes = outbox.prepare([command], self._origin, terms, noted=True)
        self._effects.asked.append(("compensate_with", command, terms))
        if _depth(self._connection) == self._depth:
            self._effects.notes += notes
            return
        # In a block of the step's own, whose rollback must be able to drop them.
        with self._connection.cursor() as cursor:
            statements.insert_notes(cursor, notes, self.state.version + 1)
        self._effects.noted += [note.id for note in notes]

    def compensate(self) -> None:
        """Undo: the noted commands are sent, newest first, each when the one before is handled.

        The instance is compensating until then, and ends as compensated. What it has waiting for
        itself is cancelled. When one of the commands fails for good, the instance is failed; a
        replay of that delivery goes on from there. In an instance that compensates already, a
        second call changes nothing.
        """
        if self.state.lifecycle == Lifecycle.RUNNING:
            self._effects.ending = Lifecycle.COMPENSATING

    def discard(self) -> None:
        """Save nothing of the state; in a step that starts, there will be no instance.

        What the step sent leaves all the same.
        """
        self._effects.discarded = True

    def _asker(self) -> tuple[str, UUID]:
        sender = self._delivery.sender_instance_id
        if sender not in (None, self.state.pk) and (self._is_asked() or not self.state.starter_id):
            return super()._asker()
        if self.state.starter_id is None:
            raise NobodyAsked(
                f"No workflow sent {self._delivery.message_name}, and none started "
                f"{self._definition.name} {self.state.pk}, so there is nobody to reply to. "
                f"Publish an event instead."
            )
        return self.state.starter_workflow, self.state.starter_id

    def _is_asked(self) -> bool:
        """Whether the message asks for something: an event tells, as does the answer of a child."""
        message = registry.message_of(self._definition, self._delivery.message_name)
        return message is not None and issubclass(message, Command)


_current: ContextVar[Context | None] = ContextVar("django_workflows_context", default=None)


@contextmanager
def entered(context: Context) -> Iterator[None]:
    """Make the context the current one while the block runs."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def _facts_now() -> dict[str, Any]:
    context = _current.get()
    return context._facts() if context is not None else {}


logs.facts_now = _facts_now


def send(*commands: Command, **options: Unpack[SendOptions]) -> list[UUID]:
    """Send commands from anywhere; the ids of the messages.

    Inside a handler or step it is the same as `context.send`. Elsewhere the commands leave if,
    and only if, the caller's transaction commits; without one they leave at once. Raises
    `WrongVerb` for an event and `NoHandler` for a command that nothing handles.
    """
    if (context := _current.get()) is not None:
        return context.send(*commands, **options)
    outbox.require_commands(commands)
    return outbox.send_in_transaction(commands, Origin(), Terms.of("send", options))


def publish(*events: Event, **options: Unpack[SendOptions]) -> list[UUID]:
    """Publish events from anywhere; the ids of the messages. The rest is as for `send`."""
    if (context := _current.get()) is not None:
        return context.publish(*events, **options)
    outbox.require_events(events)
    return outbox.send_in_transaction(events, Origin(), Terms.of("publish", options))


def _depth(connection: BaseDatabaseWrapper) -> int:
    """How many atomic blocks are open."""
    return len(connection.savepoint_ids) + connection.in_atomic_block
