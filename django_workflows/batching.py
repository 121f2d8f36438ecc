"""Changing many deliveries by hand: a batch to a transaction, each row at most once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from django.db import models, router, transaction

from django_workflows.models import Delivery, DeliveryQuerySet

#: Deliveries of one transaction.
BATCH = 500

Deliveries = models.QuerySet[Delivery]
#: Changes those of these rows that still fit; gives back which, as they were before.
Change = Callable[[Sequence[UUID]], list[Delivery]]
OnBatch = Callable[[Sequence[Delivery]], None]


def nothing(_batch: Sequence[Delivery]) -> None: ...


def in_batches(
    found: Deliveries,
    change: Change,
    *,
    limit: int | None,
    on_batch: OnBatch,
    size: int | None = None,
) -> int:
    """Change the deliveries, oldest first, by `change`; how many it has changed.

    Each batch is a transaction of its own, unless the caller has one open, so what is interrupted
    keeps what it did. What fits again at once is not visited twice.
    """
    count = 0
    ids_of = found.order_by("pk").values_list("pk", flat=True)
    page = ids_of
    while limit is None or count < limit:
        rows = size or BATCH
        ids = list(page[: rows if limit is None else min(rows, limit - count)])
        if not ids:
            break
        if changed := change(ids):
            count += len(changed)
            on_batch(changed)
        page = ids_of.filter(pk__gt=ids[-1])
    return count


def locked(ids: Sequence[UUID], condition: models.Q) -> list[Delivery]:
    """Those of these rows that fit the condition, locked, in the caller's transaction."""
    rows = (
        Delivery.objects.using(router.db_for_write(Delivery)).filter(pk__in=ids).filter(condition)
    )
    return list(
        rows.select_for_update()
        .only("message_name", "handler", "status")
        .order_by("pk")  # the same order for all, so that two of them cannot deadlock
    )


def change_each(
    ids: Sequence[UUID], condition: models.Q, apply: Callable[[DeliveryQuerySet], object]
) -> list[Delivery]:
    """Lock those of these rows that fit the condition and apply the change to them."""
    using = router.db_for_write(Delivery)
    with transaction.atomic(using=using):
        rows = locked(ids, condition)
        apply(Delivery.objects.using(using).filter(pk__in=[row.pk for row in rows]))
    return rows
