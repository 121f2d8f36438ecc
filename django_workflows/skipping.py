"""Mark as handled what somebody has seen to by hand: from code, the admin or a command."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from django.db import models, router, transaction
from django.db.models import F

from django_workflows import batching, clock, compensation, finishing, outbox
from django_workflows.batching import Deliveries, OnBatch
from django_workflows.errors import ReasonMissing
from django_workflows.models import Delivery, Status

#: What is still to be done, and is not being done at this moment.
SKIPPABLE = (Status.PENDING, Status.FAILED)


def skip(
    deliveries: Deliveries,
    *,
    reason: str,
    limit: int | None = None,
    on_batch: OnBatch = batching.nothing,
) -> int:
    """Mark those that failed, or wait, as handled, with the reason; how many there were.

    Their handlers do not run, and nothing is sent in their place. An undo command that is skipped
    lets the undoing go on: the next one leaves, or the instance ends as compensated. What is
    running is left alone. Batches and `on_batch` are as for `replay`. Raises `ReasonMissing`.
    """
    if not reason.strip():
        raise ReasonMissing("Skipping needs a reason: what was done by hand, and by whom?")

    def skip_batch(ids: Sequence[UUID]) -> list[Delivery]:
        return _skip_batch(ids, reason)

    return batching.in_batches(skippable(deliveries), skip_batch, limit=limit, on_batch=on_batch)


def skippable(deliveries: Deliveries) -> Deliveries:
    """Those of the deliveries that can be skipped, read where they are written."""
    return deliveries.using(router.db_for_write(Delivery)).filter(status__in=SKIPPABLE)


def _skip_batch(ids: Sequence[UUID], reason: str) -> list[Delivery]:
    connection = outbox.database()
    still = models.Q(status__in=SKIPPABLE)
    with transaction.atomic(connection.alias), connection.cursor() as cursor:
        rows = Delivery.objects.using(connection.alias)
        undoing = rows.filter(pk__in=ids, undoes=True).filter(still).order_by("pk")
        skipped = []
        for undo in undoing:
            compensation.lock(undo)  # before the delivery's row, as in every step
            if batching.locked([undo.pk], still):
                _mark(rows.filter(pk=undo.pk), reason)
                finishing.carry_on_undoing(cursor, undo)
                skipped.append(undo)
        others = batching.locked(ids, still & models.Q(undoes=False))
        _mark(rows.filter(pk__in=[row.pk for row in others]), reason)
    return skipped + others


def _mark(rows: Deliveries, reason: str) -> None:
    """The token moves on: a worker that has lost one of these must not take it for its own."""
    rows.update(
        status=Status.HANDLED,
        reason=reason,
        claims=F("claims") + 1,
        waits_for="",
        held_up_since=None,
        ended_at=clock.read(outbox.database()),
        relay_at=None,
    )
