"""Cancel an instance, or deliveries, from outside: from code, the admin or a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.db import router, transaction
from django.db.models import Q

from django_workflows import batching, clock, outbox, registry, telling
from django_workflows.batching import Deliveries, OnBatch
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import WorkflowsError
from django_workflows.models import (
    LIVE,
    UNENDED,
    Delivery,
    Lifecycle,
    Status,
    WorkflowState,
)
from django_workflows.outbox import Origin


def cancel_instance(instance: WorkflowState, *, reason: str = "", cascade: bool = False) -> bool:
    """End the instance as cancelled, and cancel what waits for it; False: it had ended before.

    With `cascade`, the instances that it started, and theirs, are cancelled too, and so are the
    messages that would start more. A step that is running at this moment has either committed
    before, or its save is refused and its message is ignored. Commands that it sent to others are
    not taken back. In the caller's transaction, or one of its own.
    """
    definition = _definition_of(type(instance))
    connection = outbox.database()
    with transaction.atomic(connection.alias), connection.cursor() as cursor:
        now = clock.read(connection)
        live = outbox.instances(type(instance)).filter(pk=instance.pk, lifecycle__in=LIVE)
        if not live.update(lifecycle=Lifecycle.CANCELLED, ended_at=now):
            return False
        _cancel_deliveries(definition, instance, reason or "Its instance was cancelled.", now)
        ended = outbox.instances(type(instance)).get(pk=instance.pk)
        telling.tell_starter(cursor, definition, ended, Origin(sender=definition.name))
        if cascade:
            _cancel_starts(definition, instance, reason or "Its sender was cancelled.", now)
            for child in children_of(definition, instance):
                cancel_instance(child, reason=reason, cascade=True)
    return True


#: What waits. An undo command that has left is skipped instead: the undoing would stop for ever.
CANCELLABLE = Q(status=Status.PENDING, undoes=False) | Q(status=Status.NOTED)


def cancel_deliveries(
    deliveries: Deliveries,
    *,
    reason: str,
    limit: int | None = None,
    on_batch: OnBatch = batching.nothing,
) -> int:
    """Cancel those that wait, or are noted to undo something, with the reason; how many.

    They can be replayed. Nobody is told: a step that waits for an answer to one of them goes on
    waiting. What is running is left alone, and so is an undo command that has left: skip it, or
    cancel its instance. Batches and `on_batch` are as for `replay`.
    """

    def cancel_batch(ids: Sequence[UUID]) -> list[Delivery]:
        now = clock.read(outbox.database())
        return batching.change_each(
            ids,
            CANCELLABLE,
            lambda rows: rows.update(
                status=Status.CANCELLED,
                reason=reason or "Cancelled by hand.",
                waits_for="",
                held_up_since=None,
                ended_at=now,
                relay_at=None,
            ),
        )

    found = cancellable(deliveries)
    return batching.in_batches(found, cancel_batch, limit=limit, on_batch=on_batch)


def cancellable(deliveries: Deliveries) -> Deliveries:
    """Those of the deliveries that can be cancelled, read where they are written."""
    return deliveries.using(router.db_for_write(Delivery)).filter(CANCELLABLE)


def children_of(definition: WorkflowDefinition, instance: WorkflowState) -> list[WorkflowState]:
    """The live instances, of whatever workflow, that this one started."""
    return [
        child
        for other in registry.current().workflows
        for child in outbox.instances(other.state).filter(
            starter_id=instance.pk, starter_workflow__in=definition.names, lifecycle__in=LIVE
        )
    ]


def _cancel_deliveries(
    definition: WorkflowDefinition, instance: WorkflowState, reason: str, now: Any
) -> None:
    """Cancel what waits for the instance, and what it has noted to undo."""
    deliveries = Delivery.objects.using(outbox.database().alias)
    waiting = deliveries.filter(
        instance_id=instance.pk, handler__in=definition.names, status=Status.PENDING
    )
    noted = deliveries.filter(sender_instance_id=instance.pk, status=Status.NOTED)
    for rows in (waiting, noted):
        rows.update(status=Status.CANCELLED, reason=reason, relay_at=None, ended_at=now)


def _cancel_starts(
    definition: WorkflowDefinition, instance: WorkflowState, reason: str, now: Any
) -> None:
    """Cancel what would start a child, also where that step is running: its finish is refused.

    One whose step has committed meanwhile is waited for, and is among the children after that.
    """
    starts = {
        name
        for other in registry.current().workflows
        for step in other.steps
        if step.starts
        for name in step.message.stored_names()
    }
    Delivery.objects.using(outbox.database().alias).filter(
        sender_instance_id=instance.pk,
        sender__in=definition.names,
        handler__in=[name for other in registry.current().workflows for name in other.names],
        message_name__in=starts,
        status__in=UNENDED,
        relay_at__isnull=False,  # as in the index of what has not ended
    ).update(status=Status.CANCELLED, reason=reason, relay_at=None, ended_at=now)


def _definition_of(state: type[WorkflowState]) -> WorkflowDefinition:
    for definition in registry.current().workflows:
        if definition.state is state:
            return definition
    raise WorkflowsError(
        f"No workflow is declared on {state._meta.label}. Pass an instance of a workflow's state."
    )
