"""A workflow's graph: from its declaration, and from what its deliveries say has happened."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Avg, Count, DurationField, ExpressionWrapper, F, Q, QuerySet

from django_workflows import registry
from django_workflows.declarations import Notice, Step, WorkflowDefinition
from django_workflows.graph.shape import Graph, Kind, Mark, Node, add_mean, short
from django_workflows.messages import Message
from django_workflows.models import UNENDED, Delivery, Status, WorkflowState
from django_workflows.notices import CommandFailed, JoinComplete, WorkflowEnded

#: Deliveries, of all workflows, that the figures of a graph are made from.
SAMPLE = 10_000
#: Deliveries of one instance that are marked.
MARKED = 1_000
#: How far the clocks of two machines may be apart.
SKEW = timedelta(seconds=3)

OUTSIDE = "outside"


def read(definition: WorkflowDefinition, instance: WorkflowState | None = None) -> Graph:
    """The graph of the workflow, with the figures of recent deliveries and the instance marked.

    At most six queries, each bounded: of tables of any size only `SAMPLE` rows are read.
    """
    graph = declared(definition)
    add_recent(graph, definition)
    if instance is not None:
        mark(graph, definition, instance)
    return graph


# What is declared


def declared(definition: WorkflowDefinition) -> Graph:
    """The steps, and what is known of their messages before any was sent."""
    graph = Graph(definition.name, str(definition.state._meta.verbose_name))
    for step in definition.steps:
        node = graph.node(step_key(step.name), Kind.STEP, step.name)
        if step.starts:
            node.starts = True
            graph.node(OUTSIDE, Kind.OUTSIDE, "outside")
    order = sorted(graph.nodes.values(), key=lambda n: (n.kind != Kind.OUTSIDE, not n.starts))
    graph.nodes = {node.key: node for node in order}
    for step in definition.steps:
        add_declared(graph, definition, step)
    return graph


def add_declared(graph: Graph, definition: WorkflowDefinition, step: Step) -> None:
    """What the declaration of the step says about where its messages come from."""
    key = step_key(step.name)
    if issubclass(step.message, JoinComplete):
        return
    if not issubclass(step.message, Notice):
        graph.node(key, Kind.STEP, step.name, [step.message.stored_name()])
        if step.starts:
            graph.edge(OUTSIDE, key, step.message.stored_name()).is_declared = True
        return
    if issubclass(step.message, CommandFailed):
        about = f"{step.about.stored_name()} failed"
        sources = [r.name for r in registry.current().recipients_of(step.about)]
    else:
        state = step.about
        about = f"{short(state.workflow_name or state._meta.label)} ended"
        sources = [state.workflow_name or state._meta.label]
    graph.node(key, Kind.STEP, step.name, [about])
    for name in sources:
        source = other(graph, definition, name)
        graph.edge(source.key, key, step.message.stored_name()).is_declared = True


def step_key(name: str) -> str:
    return f"step {name}"


def other(graph: Graph, definition: WorkflowDefinition, name: str) -> Node:
    """The box of a handler, or of another workflow, or of what is declared no more."""
    recipient = registry.current().recipient(name)
    if recipient is not None:
        name = recipient.name
    if isinstance(recipient, WorkflowDefinition):
        return graph.node(f"workflow {name}", Kind.WORKFLOW, name)
    messages = [message.stored_name() for message in recipient.messages] if recipient else []
    return graph.node(f"handler {name}", Kind.HANDLER, name, messages)


# What has happened


def add_recent(graph: Graph, definition: WorkflowDefinition) -> None:
    """The newest deliveries of all; or, if none is of this workflow, those since its newest one."""
    sample, since = newest()
    rows = grouped(sample, definition)
    if not rows:
        latest = definition.state._default_manager.order_by("-pk").values_list("pk", flat=True)
        if (pk := latest.first()) is not None and since is not None:
            sample, since = following(pk)
            rows = grouped(sample, definition)
    graph.since = since
    for row in rows:
        add(graph, definition, row)


def newest() -> tuple[QuerySet[Delivery], datetime | None]:
    """The newest deliveries, as many as the sample, and since when they are."""
    ids = Delivery.objects.order_by("-pk").values_list("pk", flat=True)
    first: UUID | None = next(iter(ids[SAMPLE - 1 : SAMPLE]), None)
    if first is None:
        first = Delivery.objects.order_by("pk").values_list("pk", flat=True).first()
    if first is None:
        return Delivery.objects.none(), None
    return Delivery.objects.filter(pk__gte=first), time_of(first)


def following(pk: UUID) -> tuple[QuerySet[Delivery], datetime]:
    """As many deliveries since this UUIDv7 as the sample has."""
    first = id_at(time_of(pk) - SKEW)
    after = Delivery.objects.filter(pk__gte=first)
    ids = after.order_by("pk").values_list("pk", flat=True)
    last = next(iter(ids[SAMPLE - 1 : SAMPLE]), None)
    return (after if last is None else after.filter(pk__lte=last)), time_of(first)


def time_of(uuid7: UUID) -> datetime:
    return datetime.fromtimestamp((uuid7.int >> 80) / 1000, tz=UTC)


def id_at(time: datetime) -> UUID:
    """The smallest UUIDv7 of this time."""
    return UUID(int=int(max(time.timestamp(), 0) * 1000) << 80)


FACTS = ("message_name", "handler", "step", "status", "sender", "sender_step", "undoes")


def grouped(sample: QuerySet[Delivery], definition: WorkflowDefinition) -> list[dict[str, Any]]:
    """What came to the workflow and went from it, counted and timed."""
    duration = DurationField()
    rows = (
        sample.filter(Q(handler__in=definition.names) | Q(sender__in=definition.names))
        .order_by()
        .values(*FACTS)
        .annotate(
            count=Count("pk"),
            run=Avg(ExpressionWrapper(F("ended_at") - F("started_at"), duration)),
            way=Avg(ExpressionWrapper(F("ended_at") - F("created_at"), duration)),
        )
    )
    return sorted(rows, key=lambda row: tuple(map(str, (row[name] for name in FACTS))))


def add(graph: Graph, definition: WorkflowDefinition, row: dict[str, Any]) -> None:
    """Add deliveries that are alike to their boxes and to the edge between these."""
    count, status = row["count"], row["status"]
    if not (target := target_of(graph, definition, row)):
        return
    is_own = row["message_name"] in JoinComplete.stored_names()
    graph.sampled += count
    if is_own or not is_arrival(definition, row):  # a join runs once, however many arrive
        run = row["run"].total_seconds() if row["run"] is not None else None
        if status == Status.HANDLED:
            target.seconds = add_mean(target.seconds, target.handled, run, count)
            target.handled += count
    if status == Status.FAILED:
        target.failed += count
    if status in UNENDED:
        target.waiting += count
    if is_own:
        return
    edge = graph.edge(source_of(graph, definition, row).key, target.key, name_of(row))
    edge.is_declared = False
    way = row["way"].total_seconds() if row["way"] is not None else None
    if status == Status.HANDLED:
        edge.seconds = add_mean(edge.seconds, edge.count, way, count)
    if not row["undoes"] or status not in (Status.NOTED, Status.CANCELLED):
        edge.count += count  # what was noted to undo and never needed has not been sent
    edge.undoes = edge.undoes or row["undoes"]


def target_of(graph: Graph, definition: WorkflowDefinition, row: dict[str, Any]) -> Node | None:
    """The box that a delivery went to; None when it cannot be told which step it is for."""
    if row["handler"] not in definition.names:
        return other(graph, definition, row["handler"])
    if row["step"]:
        messages = () if is_notice(row) else [name_of(row)]
        return graph.node(step_key(row["step"]), Kind.STEP, row["step"], messages)
    steps = {step.name for step in definition.steps if row["message_name"] in names(step.message)}
    continuing = {
        step.name
        for step in definition.steps
        if not step.starts and row["message_name"] in names(step.message)
    }
    for candidates in (continuing, steps):
        if len(candidates) == 1:
            return graph.nodes[step_key(candidates.pop())]
    return None


def source_of(graph: Graph, definition: WorkflowDefinition, row: dict[str, Any]) -> Node:
    if not row["sender"]:
        return graph.node(OUTSIDE, Kind.OUTSIDE, "outside")
    if row["sender"] not in definition.names:
        return other(graph, definition, row["sender"])
    return graph.node(step_key(row["sender_step"]), Kind.STEP, row["sender_step"] or "undoing")


def is_notice(row: dict[str, Any]) -> bool:
    return any(
        row["message_name"] in notice.stored_names()
        for notice in (CommandFailed, WorkflowEnded, JoinComplete)
    )


def is_arrival(definition: WorkflowDefinition, row: dict[str, Any]) -> bool:
    """Whether it is one of the messages that a join waits for."""
    return row["handler"] in definition.names and row["step"] in definition.joins


def names(message: type[Message]) -> Sequence[str]:
    return message.stored_names()


def name_of(row: dict[str, Any]) -> str:
    """The name that the message has now."""
    recipient = registry.current().recipient(row["handler"])
    message = recipient and registry.message_of(recipient, row["message_name"])
    return message.stored_name() if message else str(row["message_name"])


# Where an instance is


def mark(graph: Graph, definition: WorkflowDefinition, instance: WorkflowState) -> None:
    """Mark what the instance has been through, and what it waits for."""
    graph.instance_id = instance.pk
    latest: tuple[int, Node] | None = None
    for row in came_to(instance):
        if not (target := target_of(graph, definition, row)):
            continue
        remember(target, row)
        if row["message_name"] not in JoinComplete.stored_names():
            take(graph, definition, row, target)
        if row["status"] == Status.HANDLED and (row["version"] or 0) >= (latest or (0,))[0]:
            latest = row["version"] or 0, target
    for row in went_from(definition, instance):
        if row["instance_id"] != instance.pk and (target := target_of(graph, definition, row)):
            remember(target, row)
            take(graph, definition, row, target)
    if latest:
        latest[1].is_here = True


def remember(target: Node, row: dict[str, Any]) -> None:
    match row["status"]:
        case Status.HANDLED:
            target.remember(Mark.DONE)
        case Status.FAILED:
            target.remember(Mark.FAILED)
        case Status.PENDING | Status.RUNNING:
            target.remember(Mark.WAITING)


def take(graph: Graph, definition: WorkflowDefinition, row: dict[str, Any], target: Node) -> None:
    edge = graph.edge(source_of(graph, definition, row).key, target.key, name_of(row))
    edge.is_declared = False
    edge.is_taken = edge.is_taken or row["status"] in (Status.HANDLED, Status.FAILED, *UNENDED)


MARKS = ("instance_id", "version", *FACTS)


def came_to(instance: WorkflowState) -> list[dict[str, Any]]:
    """What has reached the instance, oldest first; the newest of it, if it is much."""
    rows = Delivery.objects.filter(instance_id=instance.pk).order_by("-pk")
    return list(rows.values(*MARKS)[:MARKED])[::-1]


def went_from(definition: WorkflowDefinition, instance: WorkflowState) -> list[dict[str, Any]]:
    """What the instance has sent, oldest first; the newest of it, if it is much."""
    sent = Delivery.objects.filter(sender_instance_id=instance.pk, sender__in=definition.names)
    return list(sent.order_by("-pk").values(*MARKS)[:MARKED])[::-1]
