"""Metrics for Prometheus: what became of deliveries, how long it took, how late, and the backlog.

In use where `prometheus-client` is installed. Counters and histograms are kept by the process
that handles; the backlog is read from the database by whichever process is asked for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.db.models import Count, Min
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from django_workflows import clock, conf, observing, outbox, registry, signals, statements
from django_workflows.endings import Ending
from django_workflows.models import Delivery, Status
from django_workflows.observing import Observer, Watch
from django_workflows.stale import close_stale_connections

logger = logging.getLogger(__name__)

#: Due deliveries that are counted per queue; what is beyond is not looked at.
BACKLOG_LIMIT = 10_000

LABELS = ("workflow", "handler")
#: Seconds; retries and a backlog make it hours.
LATENESS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400)


class Metrics(Observer):
    """Counts and times what this process handles."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.deliveries = Counter(
            "django_workflows_deliveries",
            "Deliveries that this process has handled, by how that ended.",
            (*LABELS, "ending"),
            registry=registry,
        )
        self.conflicts = Counter(
            "django_workflows_conflicts",
            "Runs that were rolled back since another writer was faster, and repeated.",
            LABELS,
            registry=registry,
        )
        self.duration = Histogram(
            "django_workflows_handling_seconds",
            "From the claim of a delivery to its end, conflicts included.",
            LABELS,
            registry=registry,
        )
        self.lateness = Histogram(
            "django_workflows_lateness_seconds",
            "From the moment that a delivery was due to its claim.",
            LABELS,
            registry=registry,
            buckets=LATENESS,
        )
        registry.register(Backlog())
        signals.delivery_failed.connect(self.gave_up)

    def started(self, delivery: Delivery) -> Watch:
        return _Timer(self, delivery)

    def gave_up(self, delivery: Delivery, error: BaseException | None, **_facts: Any) -> None:
        """The relay has failed a delivery that cost too many workers."""
        if error is None:
            self.deliveries.labels(*_labels(delivery), "failed").inc()


class _Timer(Watch):
    def __init__(self, metrics: Metrics, delivery: Delivery) -> None:
        self._metrics, self._delivery, self._labels = metrics, delivery, _labels(delivery)
        self._since = time.perf_counter()
        if delivery.started_at is not None:
            late = (delivery.started_at - delivery.due_at).total_seconds()
            metrics.lateness.labels(*self._labels).observe(max(late, 0.0))

    def conflicted(self, error: BaseException) -> None:
        self._metrics.conflicts.labels(*self._labels).inc()

    def ended(self, ending: Ending | BaseException) -> None:
        metrics, name = self._metrics, observing.name_of(self._delivery, ending)
        metrics.duration.labels(*self._labels).observe(time.perf_counter() - self._since)
        metrics.deliveries.labels(*self._labels, name).inc()


def _labels(delivery: Delivery) -> tuple[str, str]:
    return observing.workflow_of(delivery), delivery.handler


class Backlog(Collector):
    """The deliveries that are due, of the whole system, read when Prometheus asks."""

    def describe(self) -> Iterable[Metric]:
        return _gauges()

    def collect(self) -> Iterable[Metric]:
        """Nothing, when the database cannot be reached: the rest is shown all the same."""
        due, age = _gauges()
        close_stale_connections()
        try:
            now = clock.read(outbox.database())
            for queue in sorted(registry.current().queues):
                count, oldest = _due(queue, now)
                due.add_metric([queue], count)
                age.add_metric([queue], (now - oldest).total_seconds() if oldest else 0.0)
        except (DatabaseError, InterfaceError):
            logger.warning("The backlog could not be read.", exc_info=True)
            return []
        finally:
            close_stale_connections()
        return [due, age]


def _gauges() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily(
            "django_workflows_due",
            f"Deliveries that are due and not yet claimed; at most {BACKLOG_LIMIT:,} are counted.",
            labels=["queue"],
        ),
        GaugeMetricFamily(
            "django_workflows_oldest_due_seconds",
            "For how long the oldest of them has been due.",
            labels=["queue"],
        ),
    )


def _due(queue: str, now: Any) -> tuple[int, Any]:
    """How many are due on a queue, and since when; by the index that the relay reads.

    The relay looks at a row that is due again within a lease, or a little later: whatever lies
    beyond waits for its time.
    """
    soon = now + max(conf.current().LEASE, statements.LONGEST_SECOND_LOOK)
    rows = Delivery.objects.using(outbox.database().alias).filter(
        queue=queue, relay_at__lte=soon, status=Status.PENDING, due_at__lte=now
    )
    found = rows.order_by("relay_at")[:BACKLOG_LIMIT].aggregate(
        count=Count("pk"), oldest=Min("due_at")
    )
    return found["count"], found["oldest"]


def metrics(request: HttpRequest) -> HttpResponse:
    """A view of this process's metrics; with PROMETHEUS_MULTIPROC_DIR of all that share it."""
    shown = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        shown = CollectorRegistry()
        MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
        shown.register(Backlog())
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(shown), content_type=content_type)


observer = Metrics()
