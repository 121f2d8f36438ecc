"""Messages on their way out: written in the sender's transaction, handed over on its commit."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol
from uuid import UUID, uuid5

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.utils import timezone
from uuid_utils.compat import uuid7

from django_workflows import clock, conf, observing, registry, statements
from django_workflows.declarations import Recipient, WorkflowDefinition
from django_workflows.errors import (
    BrokerResting,
    MessageError,
    NoHandler,
    NotSerialisable,
    WrongVerb,
)
from django_workflows.messages import Command, Event, Message, to_json
from django_workflows.models import Delivery, WorkflowState, WorkflowStateQuerySet
from django_workflows.statements import NewDelivery

logger = logging.getLogger(__name__)

Attributes = Mapping[str, Any]


class Transport(Protocol):
    """What carries the ids of deliveries to the workers."""

    @property
    def hands_over(self) -> bool:
        """Whether deliveries that are due now reach the workers by `hand_over`."""

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None:
        """Give the ids to the workers of the queue, in bounded time; may fail."""


class NoTransport:
    """Nothing is handed over: whoever takes due rows finds them in the table."""

    hands_over = False

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None: ...


#: Set by the app when it is ready, to what fits the project's broker.
transport: Transport = NoTransport()


@dataclass(frozen=True)
class Origin:
    """What the messages that a handler or step sends inherit from it; outside one, nothing."""

    correlation_id: UUID | None = None
    causation_id: UUID | None = None
    sticky_attributes: Attributes = field(default_factory=dict)
    workflow_ids: Mapping[str, str] = field(default_factory=dict)
    sender: str = ""
    sender_instance_id: UUID | None = None
    sender_step: str = ""
    trace_context: str = ""


@dataclass(frozen=True)
class Terms:
    """How messages are to be sent: when, and with which attributes."""

    delay: timedelta | None = None
    at: datetime | None = None
    attributes: Attributes | None = None
    sticky_attributes: Attributes | None = None
    message_id: UUID | None = None
    idempotency_key: str | None = None

    @classmethod
    def of(cls, verb: str, options: Mapping[str, Any], known: Iterable[str] = ()) -> Terms:
        """The options of a call of `verb`, which has those that are `known`, or all."""
        known = tuple(known) or tuple(one.name for one in fields(cls))
        for name in options:
            if name not in known:
                raise MessageError(
                    f"{verb}() has no option {name!r}. Its options are {', '.join(known)}."
                )
        return cls(**options)

    def __post_init__(self) -> None:
        if self.delay is not None and self.at is not None:
            raise MessageError("Both delay= and at= are given. Give one of them.")
        if self.message_id is not None and self.idempotency_key is not None:
            raise MessageError("Both message_id= and idempotency_key= are given. Give one of them.")
        if self.idempotency_key == "":
            raise MessageError(
                "idempotency_key='' would make all such messages one. Give None for none."
            )
        at: Any = self.at  # what a caller without a type checker may have passed
        if not isinstance(self.delay, timedelta | None):
            raise MessageError(
                f"delay={self.delay!r} is not a timedelta. Write timedelta(seconds=...)."
            )
        if not isinstance(at, datetime | None) or (at and timezone.is_naive(at)):
            raise MessageError(
                f"at={self.at!r} is not an aware datetime. Use django.utils.timezone.now() and "
                f"timezone.make_aware()."
            )
        if at or self.delay:
            self._require_a_day(at)

    def _require_a_day(self, at: datetime | None) -> None:
        try:
            (at or clock.local() + (self.delay or timedelta(0))).astimezone(UTC)
        except OverflowError as error:
            raise MessageError(
                f"{f'at={at!r}' if at else f'delay={self.delay!r}'} is beyond the calendar, which "
                f"has the years 1 to 9999. Give a time within it."
            ) from error

    @property
    def names_a_message(self) -> bool:
        return self.message_id is not None or self.idempotency_key is not None

    def id_for(self, message: Message) -> UUID:
        """The id of the message: the one given, the one that the key stands for, or a new one."""
        if self.message_id is not None:
            return self.message_id
        if self.idempotency_key is not None:
            return uuid5(KEYS, f"{type(message).stored_name()}:{self.idempotency_key}")
        return uuid7()


#: The namespace of the ids that stand for idempotency keys.
KEYS = UUID("0d3b9a5e-4f0c-5c0e-9d1b-6c0f5a8f7d11")


def send_in_transaction(messages: Sequence[Message], origin: Origin, terms: Terms) -> list[UUID]:
    """Write these messages in the caller's transaction, or in one of their own; their ids.

    They leave if, and only if, that transaction commits.
    """
    ids, deliveries = prepare(messages, origin, terms)
    connection = database()
    several = len(deliveries) > statements.ROWS_PER_INSERT
    one = transaction.atomic(connection.alias) if several else nullcontext()
    with one, connection.cursor() as cursor:
        write(cursor, deliveries)
    return ids


def prepare(
    messages: Sequence[Message], origin: Origin, terms: Terms, *, noted: bool = False
) -> tuple[list[UUID], list[NewDelivery]]:
    """The ids of the messages, and one delivery for each handler of each of them.

    `noted` says that they are not sent, but kept until their instance compensates.
    """
    if len(messages) > 1 and terms.names_a_message:
        raise MessageError(
            f"{len(messages)} messages were given with message_id= or idempotency_key=, which name "
            f"one. Send them one by one."
        )
    ids: list[UUID] = []
    deliveries: list[NewDelivery] = []
    for message in messages:
        message_id = terms.id_for(message)
        ids.append(message_id)
        recipients = recipients_of(message)
        if recipients:
            base = _delivery_maker(message_id, message, origin, terms)
            made = [base(recipient) for recipient in recipients]
            if observing.observers and not noted:
                observing.sent(made)
            deliveries += made
    return ids, deliveries


def prepare_reply(
    message: Message, origin: Origin, terms: Terms, to: WorkflowDefinition, instance_id: UUID
) -> tuple[UUID, NewDelivery]:
    """The id of a reply, and its delivery to the instance that asked, whoever else reacts to it."""
    message_id = terms.id_for(message)
    delivery = _delivery_maker(message_id, message, origin, terms)(to)
    delivery.instance_id, delivery.part = instance_id, str(instance_id)
    if observing.observers:
        observing.sent([delivery])
    return message_id, delivery


def copy_for(delivery: Delivery, instance_id: UUID) -> NewDelivery:
    """A copy of a delivery for one of several instances that its message matches."""
    return NewDelivery(
        message_id=delivery.message_id,
        message_name=delivery.message_name,
        body=delivery.body,
        attributes=json.dumps(delivery.attributes),
        sticky_attributes=json.dumps(delivery.sticky_attributes),
        correlation_id=delivery.correlation_id,
        causation_id=delivery.causation_id,
        workflow_ids=json.dumps(delivery.workflow_ids),
        handler=delivery.handler,
        queue=delivery.queue,
        part=str(instance_id),
        instance_id=instance_id,
        sender=delivery.sender,
        sender_instance_id=delivery.sender_instance_id,
        sender_step=delivery.sender_step,
        trace_context=delivery.trace_context,
    )


def write(cursor: CursorWrapper, deliveries: Sequence[NewDelivery]) -> None:
    """Insert the deliveries in the transaction of this thread and hand them over on its commit."""
    if not deliveries:
        return
    statements.insert(cursor, deliveries, second_look=second_look())
    by_queue: dict[str, list[UUID]] = defaultdict(list)
    for delivery in deliveries:
        if delivery.is_due_now:
            by_queue[delivery.queue].append(delivery.id)
    hand_over_on_commit(by_queue)


def hand_over_on_commit(by_queue: Mapping[str, Sequence[UUID]]) -> None:
    """Give these ids to the workers when the transaction of this thread commits."""
    if by_queue:
        transaction.on_commit(partial(_hand_over, by_queue), using=database().alias, robust=True)


def second_look() -> timedelta:
    """For how long the relay leaves a row that is due now to the hand-over on commit."""
    return conf.current().LEASE if transport.hands_over else timedelta(0)


def database() -> BaseDatabaseWrapper:
    """This thread's connection to the database that the deliveries are in."""
    return connections[router.db_for_write(Delivery)]


def deliveries() -> Any:
    """The deliveries, read where they are written."""
    return Delivery.objects.using(database().alias)


def instances(state: type[WorkflowState]) -> Any:
    """The instances of a state, read and written there too; an update moves their version on."""
    return WorkflowStateQuerySet(state, using=database().alias)


def recipients_of(message: Message) -> tuple[Recipient, ...]:
    """Who gets the message; a command must have somebody."""
    recipients = registry.current().recipients_of(type(message))
    if not recipients and isinstance(message, Command):
        raise NoHandler(
            f"Nothing handles the command {type(message).__qualname__}. Add a function with "
            f"@handles({type(message).__name__}) to a handlers.py, or a step to a workflow."
        )
    if not recipients:
        logger.info("Nothing reacts to the event %s.", type(message).__qualname__)
    return recipients


def require_commands(messages: Sequence[object]) -> None:
    """Raise unless all of these can be sent."""
    _require(messages, Command, "send", "publish")


def require_events(messages: Sequence[object]) -> None:
    """Raise unless all of these can be published."""
    _require(messages, Event, "publish", "send")


def _require(messages: Sequence[object], kind: type[Message], verb: str, other: str) -> None:
    for message in messages:
        if isinstance(message, kind):
            continue
        if isinstance(message, Command | Event):
            raise WrongVerb(
                f"{type(message).__qualname__} is {_a(message)} and cannot be {_past(verb)}: "
                f"use {other}()."
            )
        raise MessageError(
            f"{message!r:.200} is not a message. Pass an instance of a class that extends "
            f"{kind.__name__}."
        )


def _a(message: Message) -> str:
    return "a command" if isinstance(message, Command) else "an event"


def _past(verb: str) -> str:
    return "sent" if verb == "send" else "published"


def _delivery_maker(message_id: UUID, message: Message, origin: Origin, terms: Terms) -> Any:
    """Everything that the deliveries of one message have in common, waiting for the recipient."""
    name = type(message).stored_name()
    sticky = {**origin.sticky_attributes, **(terms.sticky_attributes or {})}
    shared: dict[str, Any] = dict(  # noqa: C408  names of fields, as below
        message_id=message_id,
        message_name=name,
        body=to_json(message),
        attributes=_attributes(name, terms.attributes),
        sticky_attributes=_attributes(name, sticky),
        correlation_id=origin.correlation_id or message_id,
        causation_id=origin.causation_id,
        workflow_ids=json.dumps(origin.workflow_ids) if origin.workflow_ids else "{}",
        sender=origin.sender,
        sender_instance_id=origin.sender_instance_id,
        sender_step=origin.sender_step,
        trace_context=origin.trace_context,
        at=terms.at,
        delay=terms.delay or timedelta(0),
    )

    def make(recipient: Recipient) -> NewDelivery:
        return NewDelivery(
            handler=recipient.name,
            queue=recipient.queue,
            instance_id=_instance_that_travels(recipient, message, origin),
            **shared,
        )

    return make


def _instance_that_travels(recipient: Recipient, message: Message, origin: Origin) -> UUID | None:
    """The instance whose id travels along, if the recipient has no lookup, which would win."""
    if not origin.workflow_ids or not isinstance(recipient, WorkflowDefinition):
        return None
    step = recipient.step_of(message)
    travelling = origin.workflow_ids.get(recipient.name)
    return UUID(travelling) if step and step.lookup is None and travelling else None


def _attributes(name: str, attributes: Attributes | None) -> str:
    if not attributes:
        return "{}"
    try:
        text = json.dumps(attributes, allow_nan=False)
        if json.loads(text) == dict(attributes) and "\\u0000" not in text:
            text.encode()
            return text
    except (TypeError, ValueError) as error:
        reason = str(error)
    else:
        reason = "they would arrive changed"
    raise NotSerialisable(
        f"The attributes {dict(attributes)!r:.200} of {name} cannot be stored: {reason}. "
        f"Use texts as keys, and texts, numbers, booleans or None as values."
    )


def _hand_over(by_queue: Mapping[str, Sequence[UUID]]) -> None:
    """The fast path. What it does not reach, the relay hands over."""
    for queue, ids in by_queue.items():
        try:
            transport.hand_over(queue, ids)
        except BrokerResting:
            return
        except Exception:
            logger.warning(
                "Handing over %d deliveries on queue %s failed; the relay will.",
                len(ids),
                queue,
                exc_info=True,
            )
            return
