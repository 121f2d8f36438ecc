"""A lease that ran out: the work is another's, and what the slow worker did is not committed."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings

from django_workflows import (
    Command,
    HandlerContext,
    WorkflowContext,
    define_workflow,
    handles,
    leases,
    relay,
    send,
)
from django_workflows.dispatch import claim, deliver, run, settle
from django_workflows.endings import Handled, Lost
from django_workflows.models import Delivery, Status
from tests.concurrency import at_once, wait_until
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

DIES = {"LEASE": timedelta(0), "LOSSES": 4, "BACKOFF": timedelta(seconds=100)}


class WeighParcel(Command):
    number: int = 1


class PrintLabel(Command):
    pass


def lease_runs_out() -> None:
    """As if the worker had not been heard of for long."""
    Delivery.objects.filter(status=Status.RUNNING).update(relay_at="2020-01-01T00:00:00Z")


class Scales:
    """Declares a step, or a handler, that the first time waits to be overtaken."""

    def __init__(self, kind: str) -> None:
        self.runs = 0
        self.reached, self.overtaken = threading.Event(), threading.Event()

        def weigh(context: Any) -> None:
            self.runs += 1
            Note.objects.create(text="weighed")
            context.send(PrintLabel())
            if self.runs == 1:
                self.reached.set()
                assert self.overtaken.wait(30)

        if kind == "handler":

            @handles(WeighParcel)
            def handle(message: WeighParcel, context: HandlerContext) -> None:
                weigh(context)

        else:
            workflow = define_workflow(ParcelState)

            @workflow.started_by(WeighParcel)
            def step(message: Any, state: ParcelState, context: WorkflowContext[Any]) -> None:
                weigh(context)

        @handles(PrintLabel)
        def print_label(message: PrintLabel, context: HandlerContext) -> None:
            Note.objects.create(text="label")


@pytest.mark.postgres
@pytest.mark.parametrize("kind", ["handler", "step"])
def test_a_worker_that_lost_its_lease_commits_nothing_and_the_work_is_there_once(kind: str) -> None:
    """H56, two workers in one process. On SQLite the first's transaction keeps the second out."""
    scales = Scales(kind)
    send(WeighParcel())
    delivery_id = delivery_of(WeighParcel).pk

    def overtake() -> Any:
        scales.reached.wait(30)
        lease_runs_out()
        relay.take("default", 10)
        ending = deliver(delivery_id)
        scales.overtaken.set()
        return ending

    slow, fast = at_once(lambda: deliver(delivery_id), overtake)
    deliver_due()

    assert (type(slow), type(fast), scales.runs) == (Lost, Handled, 2)
    delivery = delivery_of(WeighParcel)
    assert (delivery.status, delivery.claims, delivery.losses, delivery.attempts) == (
        Status.HANDLED,
        2,
        1,
        0,
    )
    assert sorted(Note.objects.values_list("text", flat=True)) == ["label", "weighed"]
    assert ParcelState.objects.count() == (kind == "step")


def test_a_worker_that_lost_its_lease_records_no_failure() -> None:
    """H56: what it raises is its own affair by then."""

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        raise ValueError("too late")

    send(WeighParcel())
    claimed = claim(delivery_of(WeighParcel).pk)
    lease_runs_out()
    relay.take("default", 10)
    again = claim(delivery_of(WeighParcel).pk)

    assert claimed is not None
    ending = settle(claimed, run(claimed, ()))

    delivery = delivery_of(WeighParcel)
    assert isinstance(ending, Lost)
    assert again is not None
    assert (delivery.status, delivery.claims, delivery.attempts, delivery.error) == (
        Status.RUNNING,
        2,
        0,
        "",
    )


def test_a_lease_is_extended_while_its_delivery_runs_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Scales("handler").overtaken.set()
    send(WeighParcel())
    claimed = claim(delivery_of(WeighParcel).pk)
    assert claimed is not None
    first = delivery_of(WeighParcel).relay_at
    assert first is not None

    move_clock_on(monkeypatch, timedelta(seconds=20))
    leases.extend()
    outside = delivery_of(WeighParcel).relay_at
    with leases.held(claimed):
        leases.extend()
    inside = delivery_of(WeighParcel).relay_at

    assert outside == first
    assert inside is not None
    assert inside - first >= timedelta(seconds=20)


def test_a_lease_that_another_has_is_not_extended() -> None:
    Scales("handler").overtaken.set()
    send(WeighParcel())
    claimed = claim(delivery_of(WeighParcel).pk)
    assert claimed is not None
    Delivery.objects.update(claims=2, relay_at="2020-01-01T00:00:00Z")

    with leases.held(claimed):
        leases.extend()

    assert [row.status for row in relay.take("default", 10)] == [Status.PENDING]


@override_settings(DJANGO_WORKFLOWS={"RUN_LIMIT": timedelta(0), "LEASE": timedelta(hours=1)})
def test_a_run_beyond_the_limit_is_let_go_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Scales("handler").overtaken.set()
    send(WeighParcel())
    claimed = claim(delivery_of(WeighParcel).pk)
    assert claimed is not None
    before = delivery_of(WeighParcel).relay_at

    with leases.held(claimed):
        wait_until(lambda: leases.extend() or "longer than RUN_LIMIT" in caplog.text)

    assert delivery_of(WeighParcel).relay_at == before


def lose(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every worker die that takes a delivery, so many times."""
    for _ in range(times):
        for delivery_id in Delivery.objects.values_list("pk", flat=True):
            claim(delivery_id)
        relay.take("default", 100)
        move_clock_on(monkeypatch, timedelta(hours=2))


@override_settings(DJANGO_WORKFLOWS=DIES)
def test_a_delivery_that_lost_its_worker_once_is_due_at_once() -> None:
    """H55: the first loss is nobody's fault."""
    Scales("handler").overtaken.set()
    send(WeighParcel())
    claim(delivery_of(WeighParcel).pk)

    [taken] = relay.take("default", 10)

    delivery = delivery_of(WeighParcel)
    assert (taken.is_due, delivery.status, delivery.losses) == (True, Status.PENDING, 1)
    assert delivery.reason == "Its worker died or was stopped."


@override_settings(DJANGO_WORKFLOWS=DIES)
def test_deliveries_that_died_together_twice_are_not_retried_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H55: else the innocent would die with the guilty every time."""
    Scales("handler").overtaken.set()
    send(*(WeighParcel(number=number) for number in range(8)))

    lose(2, monkeypatch)

    due = sorted(Delivery.objects.values_list("due_at", flat=True))
    assert list(Delivery.objects.values_list("losses", flat=True)) == [2] * 8
    assert due[-1] - due[0] > timedelta(seconds=20)
    assert len(set(due)) == 8
    assert all(d.relay_at == d.due_at for d in Delivery.objects.all())


@override_settings(DJANGO_WORKFLOWS=DIES)
def test_a_delivery_that_lost_too_many_workers_is_failed_and_can_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H55, without the processes."""
    Scales("handler").overtaken.set()
    send(WeighParcel())

    lose(4, monkeypatch)
    failed = delivery_of(WeighParcel)
    Delivery.objects.all().replay()
    deliver_due()

    assert (failed.status, failed.losses, failed.attempts) == (Status.FAILED, 4, 0)
    assert failed.reason == "Its worker died 4 times."
    assert failed.ended_at is not None
    assert statuses_of(WeighParcel) == [Status.HANDLED]


def test_a_delivery_is_nobody_elses_before_its_lease_has_run_out() -> None:
    Scales("handler").overtaken.set()
    send(WeighParcel())
    claim(delivery_of(WeighParcel).pk)

    taken = relay.take("default", 10)

    assert taken == []
    assert deliver(delivery_of(WeighParcel).pk) is None
