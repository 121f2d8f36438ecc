"""Delete what has ended long ago: instances with their deliveries, and deliveries on their own.

Nothing that is unfinished is touched: a live instance keeps all that it was sent and has sent; a
delivery that is pending, running or noted stays, with its instance; one that has failed, too,
unless asked for. Each batch is a transaction, so it can be interrupted and repeated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import IntegrityError, models, transaction

from django_workflows import clock, conf, outbox, registry
from django_workflows.declarations import WorkflowDefinition
from django_workflows.models import (
    LIVE,
    Delivery,
    Status,
    WorkflowState,
)

#: Instances, or deliveries, of one transaction.
BATCH = 1_000

#: How far the clocks of the machines that make ids may be ahead.
SKEW = timedelta(hours=1)

ENDED = (Status.HANDLED, Status.IGNORED, Status.CANCELLED)
UNFINISHED = (Status.PENDING, Status.RUNNING, Status.NOTED)


@dataclass
class Pruned:
    """What was deleted, or would be, and what was kept although it is old enough."""

    #: By the workflow's name.
    instances: Counter[str] = field(default_factory=Counter)
    #: By the name of the handler or workflow, those of the instances included.
    deliveries: Counter[str] = field(default_factory=Counter)
    #: Old, ended instances that stay for now: by workflow and reason.
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: Pruned) -> None:
        self.instances.update(other.instances)
        self.deliveries.update(other.deliveries)
        self.kept.update(other.kept)


@dataclass(frozen=True)
class Terms:
    """What to prune, and how."""

    #: Instead of RETENTION and every `workflow_retention`.
    older_than: timedelta | None = None
    #: Only instances of this workflow, and deliveries to it.
    workflow: WorkflowDefinition | None = None
    #: Failed deliveries too.
    failed: bool = False
    batch: int = BATCH
    #: At most so many instances, and deliveries that belong to none.
    limit: int | None = None
    dry_run: bool = False

    @property
    def statuses(self) -> tuple[Status, ...]:
        return (*ENDED, Status.FAILED) if self.failed else ENDED

    def cutoff(self, now: datetime, workflow: WorkflowDefinition | None) -> datetime | None:
        """What ended before may go; None: nothing."""
        own = workflow.state.workflow_retention if workflow else None
        retention = self.older_than if self.older_than is not None else own
        try:
            return now - (conf.current().RETENTION if retention is None else retention)
        except OverflowError:  # timedelta.max: for ever
            return None


def _nothing(_pruned: Pruned) -> None: ...


def prune(terms: Terms, *, on_batch: Callable[[Pruned], None] = _nothing) -> Pruned:
    """Delete what ended before its retention; what that was.

    `on_batch` is called after each batch with what was deleted so far. Needs no transaction, and
    opens one for each batch.
    """
    pruned = Pruned()
    now = clock.read(outbox.database())
    workflows = [terms.workflow] if terms.workflow else registry.current().workflows
    for workflow in workflows:
        _prune_instances(workflow, now, terms, pruned, on_batch)
    _prune_deliveries(now, terms, pruned, on_batch)
    return pruned


def _room(terms: Terms, done: int) -> int:
    """How many the next batch may have."""
    return terms.batch if terms.limit is None else min(terms.batch, terms.limit - done)


# Instances


def _prune_instances(
    workflow: WorkflowDefinition,
    now: datetime,
    terms: Terms,
    pruned: Pruned,
    on_batch: Callable[[Pruned], None],
) -> None:
    cutoff = terms.cutoff(now, workflow)
    if cutoff is None:
        return
    ended = outbox.instances(workflow.state).filter(
        ended_at__lt=cutoff, pk__lt=clock.first_id_at(cutoff + SKEW)
    )
    page = ended.exclude(lifecycle__in=LIVE).order_by("pk")
    while (room := _room(terms, pruned.instances.total())) > 0:
        ids = _prune_page(workflow, page[:room], terms, pruned)
        if not ids:
            break
        on_batch(pruned)
        page = page.filter(pk__gt=ids[-1])


def _prune_page(
    workflow: WorkflowDefinition, page: Any, terms: Terms, pruned: Pruned
) -> Sequence[UUID]:
    """Prune the instances of one page, in a transaction; all their ids."""
    try:
        with _batch():
            ids = _locked(page.values_list("pk"), terms)
            gone = _prune_each(workflow, ids, terms)
    except IntegrityError:  # something refers to one of them that must not be deleted
        ids = list(page.values_list("pk", flat=True))
        gone = Pruned()
        for pk in ids:
            _prune_alone(workflow, pk, terms, gone)
    pruned.add(gone)
    return ids


def _prune_alone(workflow: WorkflowDefinition, pk: UUID, terms: Terms, gone: Pruned) -> None:
    try:
        with _batch():
            one = _prune_each(workflow, [pk], terms)
    except IntegrityError:
        gone.kept[workflow.name, "another row refers to it and is protected"] += 1
    else:
        gone.add(one)


def _prune_each(workflow: WorkflowDefinition, ids: Sequence[UUID], terms: Terms) -> Pruned:
    """Delete those of the instances that nothing holds, with the deliveries to them."""
    gone = Pruned()
    held = _held(workflow, ids, terms)
    free = [pk for pk in ids if pk not in held]
    gone.kept.update((workflow.name, reason) for reason in held.values())
    theirs = _deliveries().filter(
        instance_id__in=free, handler__in=workflow.names, status__in=terms.statuses
    )
    if terms.dry_run:
        deliveries = theirs.count() if free else 0
    else:
        deliveries, _per_model = theirs.delete() if free else (0, {})
        outbox.instances(workflow.state).filter(pk__in=free).delete()
    gone.instances[workflow.name] += len(free)
    gone.deliveries[workflow.name] += deliveries
    return gone


def _held(workflow: WorkflowDefinition, ids: Sequence[UUID], terms: Terms) -> dict[UUID, str]:
    """Of these instances, those that stay for now, and why."""
    held: dict[UUID, str] = {}
    reached = _deliveries().filter(instance_id__in=ids, handler__in=workflow.names)
    sent = _deliveries().filter(sender_instance_id__in=ids, sender__in=workflow.names)
    unfinished = "a delivery to it is not finished"
    held.update(dict.fromkeys(_of(reached, "instance_id", UNFINISHED), unfinished))
    noted = "it has something noted to undo"
    held.update(dict.fromkeys(_of(sent, "sender_instance_id", (Status.NOTED,)), noted))
    if not terms.failed:
        failed = "a delivery to it, or of it, has failed"
        held.update(dict.fromkeys(_of(reached, "instance_id", (Status.FAILED,)), failed))
        held.update(dict.fromkeys(_of(sent, "sender_instance_id", (Status.FAILED,)), failed))
    for relation in _cascades_to_states(workflow.state):
        rows = relation.related_model._base_manager.using(outbox.database().alias)
        name = relation.field.attname
        referring = rows.filter(**{f"{relation.field.name}__in": ids}).values_list(name, flat=True)
        reason = f"an instance of {relation.related_model._meta.label} would go with it"
        held.update(dict.fromkeys(referring.distinct(), reason))
    return held


def _of(deliveries: Any, name: str, statuses: Iterable[str]) -> Any:
    return deliveries.filter(status__in=statuses).values_list(name, flat=True).distinct()


def _cascades_to_states(state: type[WorkflowState]) -> list[Any]:
    """The relations by which deleting an instance would delete instances of a workflow."""
    return [
        relation
        for relation in state._meta.get_fields(include_hidden=True)
        if isinstance(relation, models.ManyToOneRel)
        and relation.on_delete is models.CASCADE
        and issubclass(relation.related_model, WorkflowState)
    ]


# Deliveries on their own


class _Row(NamedTuple):
    pk: UUID
    handler: str
    instance_id: UUID | None
    sender: str
    sender_instance_id: UUID | None
    ended_at: datetime


def _prune_deliveries(
    now: datetime, terms: Terms, pruned: Pruned, on_batch: Callable[[Pruned], None]
) -> None:
    """Delete old deliveries that belong to no instance, or to one that is gone."""
    cutoffs = _Cutoffs(now, terms)
    latest = cutoffs.latest()
    if latest is None:
        return
    ended = _deliveries().filter(
        status__in=terms.statuses, ended_at__lt=latest, pk__lt=clock.first_id_at(latest + SKEW)
    )
    if terms.workflow:
        ended = ended.filter(handler__in=terms.workflow.names)
    page = ended.order_by("pk").values_list(*_Row._fields)
    alone = 0
    while (room := _room(terms, pruned.instances.total() + alone)) > 0:
        with _batch():
            rows = [_Row(*row) for row in _locked(page[:room], terms, flat=False)]
            old = [row for row in rows if row.ended_at < (cutoffs.of(row.handler) or now - _EVER)]
            gone = _without_kept(old)
            if not terms.dry_run and gone:
                ids = [row.pk for row in gone]
                _deliveries().filter(pk__in=ids, status__in=terms.statuses).delete()
        if not rows:
            break
        alone += len(gone)
        pruned.deliveries.update(cutoffs.name_of(row.handler) for row in gone)
        on_batch(pruned)
        page = page.filter(pk__gt=rows[-1].pk)


_EVER = timedelta(days=365 * 1000)


class _Cutoffs:
    """Before when the deliveries to each handler or workflow must have ended."""

    def __init__(self, now: datetime, terms: Terms) -> None:
        self.now, self.terms = now, terms
        self._by_name: dict[str, datetime | None] = {}

    def of(self, handler: str) -> datetime | None:
        if handler not in self._by_name:
            self._by_name[handler] = self.terms.cutoff(self.now, _workflow(handler))
        return self._by_name[handler]

    def latest(self) -> datetime | None:
        workflow = self.terms.workflow
        names = [workflow.name] if workflow else ["", *(w.name for w in _workflows())]
        return max((cutoff for name in names if (cutoff := self.of(name))), default=None)

    def name_of(self, handler: str) -> str:
        recipient = registry.current().recipient(handler)
        return recipient.name if recipient else handler


def _without_kept(rows: Sequence[_Row]) -> list[_Row]:
    """Those whose instance is gone, if they had one, and that no live instance has sent."""
    reached, sent = defaultdict(set), defaultdict(set)
    for row in rows:
        if row.instance_id and (workflow := _workflow(row.handler)):
            reached[workflow.state].add(row.instance_id)
        if row.sender_instance_id and (workflow := _workflow(row.sender)):
            sent[workflow.state].add(row.sender_instance_id)
    there = {
        (state, pk)
        for state, ids in reached.items()
        for pk in outbox.instances(state).filter(pk__in=ids).values_list("pk", flat=True)
    }
    live = {
        (state, pk)
        for state, ids in sent.items()
        for pk in outbox.instances(state)
        .filter(pk__in=ids, lifecycle__in=LIVE)
        .values_list("pk", flat=True)
    }

    def may_go(row: _Row) -> bool:
        if row.instance_id is not None:
            workflow = _workflow(row.handler)
            if workflow is None or (workflow.state, row.instance_id) in there:
                return False  # of a workflow that is not declared here nothing is known
        sender = _workflow(row.sender) if row.sender_instance_id else None
        return sender is None or (sender.state, row.sender_instance_id) not in live

    return [row for row in rows if may_go(row)]


def _workflows() -> list[WorkflowDefinition]:
    return registry.current().workflows


def _workflow(name: str) -> WorkflowDefinition | None:
    recipient = registry.current().recipient(name)
    return recipient if isinstance(recipient, WorkflowDefinition) else None


# Rows


def _locked(page: Any, terms: Terms, *, flat: bool = True) -> list[Any]:
    """The rows of the page, locked; those that somebody else has locked are left to them."""
    features = outbox.database().features
    if not terms.dry_run and features.has_select_for_update_skip_locked:
        page = page.select_for_update(skip_locked=True)
    return [row[0] if flat else row for row in page]


def _batch() -> Any:
    return transaction.atomic(using=outbox.database().alias)


def _deliveries() -> Any:
    return Delivery._base_manager.using(outbox.database().alias)
