"""A batch of orders: place it, wait until all of it has ended, say what became of it."""

import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from django.db import InterfaceError, OperationalError, close_old_connections
from django.db.models import Count, QuerySet, Sum

from django_workflows.models import Delivery, Status
from testproject.variants import Variant

T = TypeVar("T")

POLL_EVERY = 0.25  # seconds
CLOCKS_APART = 300  # seconds by which the clocks of all machines involved agree


@dataclass(frozen=True)
class Batch:
    """The orders that one run places; `id` is stored with each of them."""

    variant: Variant
    size: int
    deadline: float  # by time.monotonic(); nothing is waited for after it
    id: UUID = field(default_factory=uuid.uuid4)
    started: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)

    @property
    def orders(self) -> Any:
        return self.variant.order.objects.filter(batch=self.id)

    @property
    def instances(self) -> Any:
        return self.variant.state.objects.filter(order_id__in=self.orders.values("id"))

    @property
    def deliveries(self) -> QuerySet[Delivery]:
        """Read by the primary key, whose values grow with time: the table may be long.

        Without undo commands that were noted and never sent.
        """
        earliest = UUID(int=int((self.started_at - CLOCKS_APART) * 1000) << 80)
        return Delivery.objects.filter(
            id__gte=earliest, correlation_id__in=self.orders.values("message_id")
        ).exclude(undoes=True, status__in=(Status.NOTED, Status.CANCELLED))


def place(batch: Batch) -> Iterator[None]:
    """Place the orders one by one; yields after each. A restart of the database only delays it."""
    for _ in range(batch.size):
        # The id is chosen before the first try, so a second one places nothing twice.
        place_order = partial(batch.variant.place_order, uuid.uuid4(), batch=batch.id)
        _through_outages(batch, place_order)
        yield


def wait(batch: Batch) -> Iterator[int]:
    """Yields how many orders have ended, until it is all of them or the deadline has passed."""
    while True:
        ended = _through_outages(batch, batch.instances.filter(ended_at__isnull=False).count)
        yield ended
        if ended >= batch.size or time.monotonic() > batch.deadline:
            return
        time.sleep(POLL_EVERY)


def summary(batch: Batch) -> dict[str, Any]:
    """What became of this batch alone, as the object that `--json` prints."""
    seconds = time.monotonic() - batch.started
    return _through_outages(batch, lambda: _summary(batch, seconds))


def _summary(batch: Batch, seconds: float) -> dict[str, Any]:
    ended = dict(
        batch.instances.filter(ended_at__isnull=False)
        .values_list("status")
        .annotate(Count("id"))
        .order_by()
    )
    completed, declined = ended.get("completed", 0), ended.get("declined", 0)
    compensated = batch.instances.filter(lifecycle="compensated").count()
    deliveries = dict(
        batch.deliveries.values_list("status").annotate(Count("id")).order_by("status")
    )
    counts = batch.deliveries.aggregate(retries=Sum("attempts"), conflicts=Sum("conflicts"))
    return {
        "orders": batch.size,
        "completed": completed,
        "declined": declined,
        "compensated": compensated,
        "unfinished": batch.size - completed - declined - compensated,
        "rows": {
            name: model.objects.filter(order_id__in=batch.orders.values("id")).count()
            for name, model in batch.variant.rows.items()
        },
        "deliveries": deliveries,
        "retries": counts["retries"] or 0,
        "conflicts": counts["conflicts"] or 0,
        "seconds": round(seconds, 3),
        "latency_ms": _latency_ms(batch),
        "deliveries_per_second": round(deliveries.get("handled", 0) / seconds, 1),
    }


def _latency_ms(batch: Batch) -> dict[str, float | None]:
    placed_at = dict(batch.orders.values_list("id", "placed_at"))
    completed = batch.instances.filter(status="completed", ended_at__isnull=False)
    latencies = sorted(
        (ended_at - placed_at[order_id]).total_seconds() * 1000
        for order_id, ended_at in completed.values_list("order_id", "ended_at")
    )
    return {"p50": _percentile(latencies, 0.50), "p99": _percentile(latencies, 0.99)}


def _percentile(values: list[float], share: float) -> float | None:
    return round(values[math.ceil(share * len(values)) - 1], 1) if values else None


def _through_outages(batch: Batch, function: Callable[[], T]) -> T:
    """Call the function until the database answers or the batch's deadline has passed."""
    while True:
        try:
            return function()
        except (OperationalError, InterfaceError):
            if time.monotonic() > batch.deadline:
                raise
            close_old_connections()
            time.sleep(POLL_EVERY)
