"""Make due now what waits for its time: from code, the admin or a command."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from django.db import models, router

from django_workflows import batching, clock, outbox
from django_workflows.batching import Deliveries, OnBatch
from django_workflows.models import Delivery, Status


def make_due(
    deliveries: Deliveries, *, limit: int | None = None, on_batch: OnBatch = batching.nothing
) -> int:
    """Make due now those that wait for a later time: timeouts, delays, retries; how many.

    What waits for its instance to be created is left alone: it is due as soon as there is one.
    Batches and `on_batch` are as for `replay`; the workers get them from the relay.
    """
    return batching.in_batches(waiting(deliveries), _make_due, limit=limit, on_batch=on_batch)


def waiting(deliveries: Deliveries) -> Deliveries:
    """Those of the deliveries that wait for a later time, read where they are written."""
    return deliveries.using(router.db_for_write(Delivery)).filter(_still())


def _still() -> models.Q:
    now = clock.read(outbox.database())
    return models.Q(status=Status.PENDING, waits_for="", due_at__gt=now)


def _make_due(ids: Sequence[UUID]) -> list[Delivery]:
    now = clock.read(outbox.database())
    return batching.change_each(ids, _still(), lambda rows: rows.update(due_at=now, relay_at=now))
