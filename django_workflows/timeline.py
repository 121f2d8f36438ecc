"""What has happened to an instance, in order, and what it waits for: as data, for whoever shows it.

Everything is read from the deliveries and the states by an index, in a fixed number of queries,
and a page at a time. Nothing is masked here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Count, F, Q, QuerySet, Value, Window
from django.db.models.functions import Right, RowNumber

from django_workflows import outbox, registry
from django_workflows.declarations import Join, Step, WorkflowDefinition
from django_workflows.messages import Command
from django_workflows.models import (
    UNENDED,
    Delivery,
    Status,
    WorkflowState,
)
from django_workflows.notices import CommandFailed, JoinComplete

#: Deliveries on one page of a timeline.
PAGE = 40
#: Of what one step has sent, or of what waits alike, so many are listed.
LISTED = 8
#: Characters of a traceback, from its end.
TRACEBACK = 3_000
#: Instances that this one has started.
CHILDREN = 50
#: How far the clocks of two machines may be apart.
SKEW = timedelta(seconds=10)
#: How many deliveries are looked at, from the first of a conversation on, for others of it.
LOOKED_THROUGH = 2_000

#: Columns that a list does without.
WIDE = ("body", "original_body", "attributes", "sticky_attributes", "workflow_ids", "traceback")


@dataclass
class Sent:
    """Deliveries of messages that were sent alike, the first of them, and how many there are."""

    listed: list[Delivery] = field(default_factory=list)
    in_all: int = 0

    @property
    def others(self) -> int:
        return self.in_all - len(self.listed)


@dataclass
class Entry:
    """What became of one message that reached the instance, or of a command that undoes."""

    delivery: Delivery
    #: started, handled, arrived (for a join), by hand, undone; or the status.
    kind: str
    sent: Sent = field(default_factory=Sent)

    @property
    def at(self) -> datetime | None:
        """When it ended; None: it has not."""
        return self.delivery.ended_at


@dataclass
class Timeline:
    """A page of it, oldest first; page 1 is the newest."""

    entries: list[Entry]
    page: int
    has_older: bool

    @property
    def is_whole(self) -> bool:
        return self.page == 1 and not self.has_older


@dataclass
class JoinState:
    """A step that waits until several messages have arrived."""

    step: Step
    arrived: int
    needed: int | None
    #: Stored names of those of which none has arrived, if one of each is awaited.
    missing: list[str]


@dataclass
class Waiting:
    """What an instance that has not ended waits for, and what holds it up."""

    #: Failed deliveries to it, or commands of its own that failed and that it was not told about.
    failed: list[Sent] = field(default_factory=list)
    #: Commands that failed, for which the workflow has a step `@on_failure`.
    told: list[Sent] = field(default_factory=list)
    #: Undo commands that failed: the undoing has stopped there.
    undo_failed: list[Sent] = field(default_factory=list)
    #: Messages to itself, or for itself, that are not due yet or not handled yet.
    timeouts: list[Sent] = field(default_factory=list)
    incoming: list[Sent] = field(default_factory=list)
    #: What it sent to others and is not handled yet; what was handled, and brought no answer.
    commands: list[Sent] = field(default_factory=list)
    unanswered: list[Delivery] = field(default_factory=list)
    #: Undo commands, noted and not sent.
    noted: list[Sent] = field(default_factory=list)
    joins: list[JoinState] = field(default_factory=list)
    #: Steps that no message has reached yet.
    unseen: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Relative:
    """Another instance, and how it is related: parent, child, or of the same conversation."""

    kind: str
    workflow: str
    id: UUID
    lifecycle: str = ""


# What has happened


def timeline_of(
    instance: WorkflowState, *, page: int = 1, size: int = PAGE, wide: bool = False
) -> Timeline:
    """A page of what has happened to the instance, in two queries.

    `wide` reads the bodies and tracebacks too; without it `delivery.traceback_end` is there.
    """
    definition = registry.current().recipient(_name_of(instance))
    found = happened_to(instance, wide=wide)
    start = (page - 1) * size
    rows = list(found[start : start + size + 1])
    sent = _sent_by(instance, rows[:size], wide)
    entries = [
        Entry(row, _kind_of(row, instance, definition), sent.get(row.message_id, Sent()))
        for row in reversed(rows[:size])
    ]
    return Timeline(entries, page, has_older=len(rows) > size)


def happened_to(instance: WorkflowState, *, wide: bool = False) -> QuerySet[Delivery]:
    """Deliveries to the instance, and commands that undo what it did; newest first."""
    to_it = Q(instance_id=instance.pk)
    left = ~Q(status=Status.NOTED) & ~Q(status=Status.CANCELLED, claims=0)
    undoing = Q(sender_instance_id=instance.pk, undoes=True) & left
    rows = _deliveries(wide).filter(to_it | undoing)
    return rows.order_by(F("ended_at").desc(nulls_first=True), "-pk")


def _sent_by(
    instance: WorkflowState, rows: Sequence[Delivery], wide: bool
) -> dict[UUID | None, Sent]:
    """What the instance sent while it handled these, by the message that caused it."""
    causes = [row.message_id for row in rows if row.instance_id == instance.pk]
    if not causes:
        return {}
    sent = _deliveries(wide).filter(sender_instance_id=instance.pk, causation_id__in=causes)
    found: dict[UUID | None, Sent] = defaultdict(Sent)
    for row in _first_of_each(sent, "causation_id"):
        found[row.causation_id].listed.append(row)
        found[row.causation_id].in_all = row.in_all
    return found


def _kind_of(delivery: Delivery, instance: WorkflowState, definition: Any) -> str:
    if delivery.instance_id != instance.pk:
        return "undone" if delivery.status == Status.HANDLED else str(delivery.status)
    if delivery.status != Status.HANDLED:
        return str(delivery.status)
    if not delivery.step:
        return "by hand"
    joins = definition.joins if isinstance(definition, WorkflowDefinition) else {}
    if delivery.step in joins and delivery.version is None:
        return "arrived"
    return "started" if delivery.version == 1 else "handled"


# What it waits for


def waiting_of(instance: WorkflowState, timeline: Timeline | None = None) -> Waiting:
    """What the instance waits for, in two queries; nothing, if it has ended.

    What was handled without an answer is told only when the whole timeline is given.
    """
    waiting = Waiting()
    definition = registry.current().recipient(_name_of(instance))
    if not instance.is_live or not isinstance(definition, WorkflowDefinition):
        return waiting
    for group in _unended(instance):
        _place_for(waiting, group.listed[0], instance, definition).append(group)
    seen = seen_by(instance)
    waiting.joins = [
        _join_state(step, step.join, instance, seen)
        for step in definition.joins.values()
        if step.join and (step.name, JoinComplete.stored_name()) not in seen
    ]
    steps = {name for name, _message in seen}
    waiting.unseen = [
        step for step in definition.steps if not step.starts and step.name not in steps
    ]
    if timeline is not None and timeline.is_whole:
        waiting.unanswered = _unanswered(timeline.entries, definition)
    return waiting


def seen_by(instance: WorkflowState) -> dict[tuple[str, str], int]:
    """How many messages each step of the instance has handled, by step and message."""
    rows = _deliveries(True).filter(instance_id=instance.pk, status=Status.HANDLED)
    counted = rows.order_by().values_list("step", "message_name").annotate(Count("pk"))
    return {(step, message): count for step, message, count in counted}


def _unended(instance: WorkflowState) -> list[Sent]:
    """Deliveries to it and of it that have not ended well, alike ones together, the first due."""
    to_it, of_it = Q(instance_id=instance.pk), Q(sender_instance_id=instance.pk)
    rows = _deliveries(False).filter(to_it | of_it)
    rows = rows.filter(status__in=(*UNENDED, Status.FAILED, Status.NOTED))
    groups: dict[tuple[Any, ...], Sent] = defaultdict(Sent)
    alike = ("message_name", "handler", "status", "undoes")
    for row in _first_of_each(rows, *alike, order="due_at"):
        group = groups[tuple(getattr(row, name) for name in alike)]
        group.listed.append(row)
        group.in_all = row.in_all
    return list(groups.values())


def _place_for(
    waiting: Waiting, delivery: Delivery, instance: WorkflowState, definition: WorkflowDefinition
) -> list[Sent]:
    """Where what waits like this is listed."""
    own = delivery.sender_instance_id == instance.pk
    to_it = delivery.instance_id == instance.pk and delivery.handler in definition.names
    match delivery.status:
        case Status.NOTED:
            return waiting.noted
        case Status.FAILED if delivery.undoes:
            return waiting.undo_failed
        case Status.FAILED if own and _is_told(delivery, definition):
            return waiting.told
        case Status.FAILED:
            return waiting.failed
        case _ if to_it and own and not delivery.undoes:
            return waiting.timeouts
        case _ if to_it:
            return waiting.incoming
    return waiting.commands


def _is_told(delivery: Delivery, definition: WorkflowDefinition) -> bool:
    """Whether the workflow has a step for the failure of this command."""
    return any(
        step.message is CommandFailed and delivery.message_name in step.about.stored_names()
        for step in definition.steps
    )


def _join_state(
    step: Step, join: Join, instance: WorkflowState, seen: dict[tuple[str, str], int]
) -> JoinState:
    arrived = {
        message: sum(seen.get((step.name, name), 0) for name in message.stored_names())
        for message in join.messages
    }
    try:
        needed: int | None = join.needed(instance)
    except Exception:  # a function of the project's, on an instance in whatever state
        needed = None
    if join.count is not None:
        return JoinState(step, sum(arrived.values()), needed, [])
    missing = [message.stored_name() for message, count in arrived.items() if not count]
    return JoinState(step, len(arrived) - len(missing), needed, missing)


def _unanswered(entries: Iterable[Entry], definition: WorkflowDefinition) -> list[Delivery]:
    """Commands that were handled by others and brought no message to the instance.

    A workflow may answer in a step of its own that comes later: whatever it has sent counts.
    """
    entries = list(entries)
    answered = {entry.delivery.causation_id for entry in entries}
    heard_of = {entry.delivery.sender_instance_id for entry in entries} - {None}
    return [
        sent
        for entry in entries
        for sent in entry.sent.listed
        if sent.status == Status.HANDLED
        and not sent.undoes
        and sent.handler not in definition.names
        and sent.message_id not in answered
        and sent.instance_id not in heard_of
        and is_command(sent)
    ]


def is_command(delivery: Delivery) -> bool:
    """Whether its message is known to be a command."""
    recipient = registry.current().recipient(delivery.handler)
    message = registry.message_of(recipient, delivery.message_name) if recipient else None
    return message is not None and issubclass(message, Command)


# Whom it is related to


def relatives_of(instance: WorkflowState) -> list[Relative]:
    """The instance that started it, and those that it started, in one query."""
    parts = []
    own = (_name_of(instance), *instance.workflow_aliases)
    for definition in registry.current().workflows:
        rows = outbox.instances(definition.state)
        related = {"child": rows.filter(starter_id=instance.pk, starter_workflow__in=own)}
        if instance.starter_id and instance.starter_workflow in definition.names:
            related["parent"] = rows.filter(pk=instance.starter_id)
        parts += [
            found.order_by()
            .annotate(relation=Value(kind), workflow=Value(definition.name))
            .values_list("relation", "workflow", "pk", "lifecycle")
            for kind, found in related.items()
        ]
    if not parts:
        return []
    found = parts[0].union(*parts[1:], all=True) if len(parts) > 1 else parts[0]
    return [Relative(*row) for row in found[: CHILDREN + 1]]


def neighbours_of(instance: WorkflowState, timeline: Timeline) -> list[Relative]:
    """Other instances of the conversation: those it exchanged messages with, and those nearby.

    In one query, which looks through a fixed number of deliveries from the beginning of the
    conversation on; the rest of a long one is found by a search for its correlation id.
    """
    found: dict[tuple[str, UUID], None] = {}
    for entry in timeline.entries:
        for name, pk in (
            (entry.delivery.sender, entry.delivery.sender_instance_id),
            *((sent.handler, sent.instance_id) for sent in entry.sent.listed),
        ):
            if pk is not None:
                found[name, pk] = None
    for conversation in list(conversations_of(timeline))[:1]:
        near = Delivery.objects.using(outbox.database().alias)
        near = near.filter(pk__gte=_first_id_of(conversation, instance.pk)).order_by("pk")
        others = Delivery.objects.using(outbox.database().alias).filter(
            pk__in=near.values("pk")[:LOOKED_THROUGH],
            correlation_id=conversation,
            instance_id__isnull=False,
        )
        pairs = others.order_by().values_list("handler", "instance_id").distinct()
        found |= {(name, pk): None for name, pk in pairs if pk}
    own = {instance.pk, instance.starter_id}
    return [Relative("neighbour", *pair) for pair in found if pair[1] not in own][:CHILDREN]


def conversations_of(timeline: Timeline) -> list[UUID]:
    """The correlation ids on the page, the oldest first."""
    return list(dict.fromkeys(entry.delivery.correlation_id for entry in timeline.entries))


def _first_id_of(conversation: UUID, instance_id: UUID) -> UUID:
    """The smallest UUIDv7 that a delivery of the conversation may have."""
    first = conversation if conversation.version == 7 else instance_id
    milliseconds = (first.int >> 80) - int(SKEW.total_seconds() * 1000)
    return UUID(int=max(milliseconds, 0) << 80)


# Rows


def _deliveries(wide: bool) -> QuerySet[Delivery]:
    rows: QuerySet[Delivery] = Delivery.objects.using(outbox.database().alias)
    if wide:
        return rows.all()
    return rows.defer(*WIDE).annotate(traceback_end=Right("traceback", TRACEBACK))


def _first_of_each(rows: QuerySet[Delivery], *columns: str, order: str = "pk") -> QuerySet[Any]:
    """The first few of those with the same values; `in_all` is how many there are."""
    return (
        rows.annotate(
            place=Window(RowNumber(), partition_by=[*columns], order_by=[order, "pk"]),
            in_all=Window(Count("pk"), partition_by=[*columns]),
        )
        .filter(place__lte=LISTED)
        .order_by(order, "pk")
    )


def _name_of(instance: WorkflowState) -> str:
    return instance.workflow_name or instance._meta.label
