"""Metrics: what became of deliveries, how long it took, how late they were, and the backlog."""

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection
from django.db.models import F
from django.test import RequestFactory, override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client import CollectorRegistry

from django_workflows import (
    Command,
    Event,
    define_workflow,
    handles,
    observing,
    prometheus,
    publish,
    relay,
    send,
)
from django_workflows.dispatch import claim
from django_workflows.errors import StaleState
from django_workflows.models import Delivery, Status
from django_workflows.prometheus import Backlog, Metrics
from tests.delivering import deliver_due, delivery_of
from tests.models import ParcelState
from tests.stored import stored

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Value = Callable[..., float | None]


class ParcelPosted(Event):
    pass


class WeighParcel(Command):
    pass


@pytest.fixture
def value(monkeypatch: pytest.MonkeyPatch) -> Iterator[Value]:
    """`value("deliveries_total", handler=..., ...)`: a sample of a registry of this test's own."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    monkeypatch.setattr(observing, "observers", (metrics,))

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"django_workflows_{name}", labels)

    yield read
    del metrics
    gc.collect()  # its receiver of signals with it


WEIGH = {"workflow": "", "handler": "tests.weigh"}


def declare_weigh(*errors: Exception | None) -> None:
    """A handler that raises these in turn, then nothing."""
    left = list(errors)

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        if left and (error := left.pop(0)):
            raise error


def test_handled_deliveries_are_counted_by_handler(value: Value) -> None:
    declare_weigh()

    send(WeighParcel(), WeighParcel())
    deliver_due()

    assert value("deliveries_total", **WEIGH, ending="handled") == 2


def test_deliveries_to_a_workflow_are_counted_by_it(value: Value) -> None:
    workflow = define_workflow(ParcelState)
    workflow.started_by(ParcelPosted)(lambda message, state, context: None)

    publish(ParcelPosted())
    deliver_due()

    name = "tests.ParcelState"
    assert value("deliveries_total", workflow=name, handler=name, ending="handled") == 1


@override_settings(DJANGO_WORKFLOWS={"BACKOFF": timedelta(0), "ATTEMPTS": 2})
def test_retries_and_the_failure_for_good_are_counted_apart(value: Value) -> None:
    declare_weigh(ValueError("no scales"), ValueError("no scales"))

    send(WeighParcel())
    deliver_due()

    assert value("deliveries_total", **WEIGH, ending="retried") == 1
    assert value("deliveries_total", **WEIGH, ending="failed") == 1
    assert value("deliveries_total", **WEIGH, ending="handled") is None


@override_settings(DJANGO_WORKFLOWS={"LOSSES": 1, "LEASE": timedelta(seconds=-1)})
def test_a_delivery_that_cost_too_many_workers_is_counted_as_failed(value: Value) -> None:
    declare_weigh()
    send(WeighParcel())
    claim(delivery_of(WeighParcel).id)

    relay.take("default", 10)

    assert delivery_of(WeighParcel).status == Status.FAILED
    assert value("deliveries_total", **WEIGH, ending="failed") == 1


def test_conflicts_are_counted(value: Value) -> None:
    declare_weigh(StaleState("another was faster"), StaleState("another was faster"))

    send(WeighParcel())
    deliver_due()

    assert value("conflicts_total", **WEIGH) == 2
    assert value("deliveries_total", **WEIGH, ending="handled") == 1


def test_the_time_that_handling_takes_is_observed(value: Value) -> None:
    def slow_for_the_clock(message: WeighParcel, context: Any) -> None:
        until = timezone.now() + timedelta(milliseconds=60)
        while timezone.now() < until:
            pass

    handles(WeighParcel, name="tests.weigh")(slow_for_the_clock)

    send(WeighParcel())
    deliver_due()

    assert value("handling_seconds_count", **WEIGH) == 1
    assert (value("handling_seconds_sum", **WEIGH) or 0) >= 0.06


def test_lateness_is_from_due_to_claimed(value: Value) -> None:
    declare_weigh()
    send(WeighParcel())
    Delivery.objects.update(due_at=F("due_at") - timedelta(seconds=100))

    deliver_due()

    assert value("lateness_seconds_count", **WEIGH) == 1
    assert 100 <= (value("lateness_seconds_sum", **WEIGH) or 0) < 160


# The backlog


def test_the_backlog_is_what_is_due_and_not_claimed(value: Value) -> None:
    declare_weigh()
    send(WeighParcel(), WeighParcel(), WeighParcel())
    send(WeighParcel(), delay=timedelta(minutes=1))
    claim(Delivery.objects.earliest("id").id)

    assert value("due", queue="default") == 2


def test_what_the_relay_has_handed_over_is_still_in_the_backlog(value: Value) -> None:
    now = timezone.now()
    stored(
        status=Status.PENDING,
        due_at=now - timedelta(hours=2),
        relay_at=now + timedelta(minutes=4, seconds=59),
    )

    assert value("due", queue="default") == 1
    assert 7200 <= (value("oldest_due_seconds", queue="default") or 0) < 7260


def test_each_queue_has_its_own_backlog(value: Value) -> None:
    handles(WeighParcel, queue="slow")(lambda message, context: None)
    send(WeighParcel())

    assert value("due", queue="slow") == 1
    assert value("due", queue="default") == 0


def test_without_a_backlog_its_age_is_zero(value: Value) -> None:
    assert value("due", queue="default") == 0
    assert value("oldest_due_seconds", queue="default") == 0


def test_the_backlog_is_counted_up_to_a_limit(
    value: Value, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "BACKLOG_LIMIT", 3)
    now = timezone.now()
    for minutes in range(5):
        long_ago = now - timedelta(minutes=minutes)
        stored(status=Status.PENDING, due_at=long_ago, relay_at=long_ago)

    assert value("due", queue="default") == 3
    assert 240 <= (value("oldest_due_seconds", queue="default") or 0) < 300


def test_reading_the_backlog_takes_one_statement_for_each_queue_and_one_for_the_clock() -> None:
    with CaptureQueriesContext(connection) as queries:
        list(Backlog().collect())

    assert len(queries) == 1 + (connection.vendor == "postgresql")


@pytest.mark.postgres
def test_the_backlog_is_read_by_the_index_of_the_relay() -> None:
    now = timezone.now()
    stored(status=Status.PENDING)
    with CaptureQueriesContext(connection) as queries:
        prometheus._due("default", now)

    with connection.cursor() as cursor:
        # Of one row the planner would read all, or sort what a bitmap finds.
        cursor.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        cursor.execute(f"EXPLAIN {queries[-1]['sql']}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
        cursor.execute("RESET enable_seqscan; RESET enable_bitmapscan")

    assert "django_workflows_due" in plan
    assert "Sort" not in plan


def test_registering_the_backlog_reads_nothing() -> None:
    with CaptureQueriesContext(connection) as queries:
        CollectorRegistry(auto_describe=True).register(Backlog())

    assert len(queries) == 0


def test_without_a_database_the_other_metrics_are_shown_all_the_same(
    value: Value, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare_weigh()
    send(WeighParcel())
    deliver_due()

    with connection.execute_wrapper(out_of_reach):
        due, handled = (
            value("due", queue="default"),
            value("deliveries_total", **WEIGH, ending="handled"),
        )

    assert (due, handled) == (None, 1)
    assert "The backlog could not be read." in caplog.text


def out_of_reach(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    raise DatabaseError("the database is away")


# The view


def test_the_view_shows_the_metrics_of_this_process() -> None:
    response = prometheus.metrics(RequestFactory().get("/metrics"))

    shown = response.content.decode()
    assert response.headers["Content-Type"].startswith("text/plain")
    assert "# TYPE django_workflows_deliveries_total counter" in shown
    assert 'django_workflows_due{queue="default"} 0.0' in shown


def test_the_view_speaks_openmetrics_to_those_who_ask_for_it() -> None:
    accept = "application/openmetrics-text; version=1.0.0"

    response = prometheus.metrics(RequestFactory().get("/metrics", HTTP_ACCEPT=accept))

    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert response.content.endswith(b"# EOF\n")
