"""Timeouts: an instance sends itself a command for later, and can take it back."""

import re
import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    clock,
    handles,
    publish,
    send,
    started_by,
    when,
)
from django_workflows.dispatch import claim, deliver, run, settle
from django_workflows.endings import Lost
from django_workflows.models import Delivery, Status
from django_workflows.relay import take
from tests.concurrency import at_once
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import Note, ParcelState
from tests.racing import Meeting, deliver_at_once

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class ParcelPosted(Event):
    number: int = 1


class ParcelArrived(Event):
    number: int = 1


class ParcelOverdue(Command):
    """A timeout."""

    round: int = 1


class AskCourier(Command):
    """Another one."""


class PrintLabel(Command):
    pass


class RemindLater(Command):
    pass


def prints_labels() -> None:
    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="label")


class Timeouts:
    """Declares a workflow with two timeouts; `on_arrival` is what it does about them."""

    def __init__(self, on_arrival: Any) -> None:
        class Parcels(Workflow[ParcelState]):
            @started_by(ParcelPosted)
            def post(self, message: ParcelPosted) -> None:
                self.state.number = message.number
                self.send(ParcelOverdue(), AskCourier(), delay=timedelta(hours=1))
                self.send(PrintLabel(), delay=timedelta(hours=1))

            @when(ParcelArrived, lookup="number")
            def arrive(self, message: ParcelArrived) -> None:
                on_arrival(self)

            @when(ParcelOverdue)
            def complain(self, message: ParcelOverdue) -> None:
                self.state.seen.append(f"overdue {message.round}")

            @when(AskCourier)
            def ask(self, message: AskCourier) -> None:
                self.state.seen.append("asked")

        prints_labels()


def test_a_timeout_reaches_the_instance_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """E38."""
    Timeouts(on_arrival=lambda workflow: workflow.cancel(ParcelOverdue))
    publish(*(ParcelPosted(number=number) for number in (1, 2, 3)))
    deliver_due()
    publish(ParcelArrived(number=1), ParcelArrived(number=3))
    deliver_due()

    move_clock_on(monkeypatch, timedelta(hours=2))
    deliver_due()

    seen = {s.number: sorted(s.seen) for s in ParcelState.objects.all()}
    assert seen == {1: ["asked"], 2: ["asked", "overdue 1"], 3: ["asked"]}


def test_a_cancelled_timeout_stays_as_a_row_that_says_so() -> None:
    """E39."""
    Timeouts(on_arrival=lambda workflow: workflow.cancel(ParcelOverdue))
    publish(ParcelPosted())
    deliver_due()

    publish(ParcelArrived())
    deliver_due()

    overdue = delivery_of(ParcelOverdue)
    assert (overdue.status, overdue.reason) == (
        Status.CANCELLED,
        "Cancelled by tests.ParcelState.",
    )
    assert statuses_of(AskCourier) == [Status.PENDING]
    assert ParcelState.objects.get().version == 2


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic])
@pytest.mark.parametrize("in_one_word", [False, True])
def test_a_timeout_that_is_cancelled_and_sent_again_is_replaced(
    monkeypatch: pytest.MonkeyPatch, in_one_word: bool, block: Any
) -> None:
    """E39. Also when the new one was inserted at once, inside a block of the step's own."""

    def cancel_and_send(workflow: Any) -> None:
        workflow.cancel(ParcelOverdue)
        with block():
            workflow.send(ParcelOverdue(round=2), delay=timedelta(hours=5))

    def send_again(workflow: Any) -> None:
        with block():
            workflow.send_again(ParcelOverdue(round=2), delay=timedelta(hours=5))

    Timeouts(on_arrival=send_again if in_one_word else cancel_and_send)
    publish(ParcelPosted())
    deliver_due()
    publish(ParcelArrived())
    deliver_due()

    move_clock_on(monkeypatch, timedelta(hours=2))
    deliver_due()
    early = list(ParcelState.objects.get().seen)
    move_clock_on(monkeypatch, timedelta(hours=5))
    deliver_due()

    assert early == ["asked"]
    assert ParcelState.objects.get().seen == ["asked", "overdue 2"]


def test_a_timeout_that_sends_itself_again_comes_round_after_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that is being handled is not the one that is replaced."""

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.send(ParcelOverdue(), delay=timedelta(hours=1))

        @when(ParcelOverdue)
        def remind(self, message: ParcelOverdue) -> None:
            self.state.seen.append(message.round)
            self.send_again(ParcelOverdue(round=message.round + 1), delay=timedelta(hours=1))

    publish(ParcelPosted())
    deliver_due()
    for _ in range(3):
        move_clock_on(monkeypatch, timedelta(minutes=61))
        deliver_due()

    assert ParcelState.objects.get().seen == [1, 2, 3]
    assert statuses_of(ParcelOverdue) == [Status.HANDLED] * 3 + [Status.PENDING]


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic])
def test_what_a_step_sent_and_cancels_again_never_leaves(block: Any) -> None:
    def hesitate(workflow: Any) -> None:
        with block():
            workflow.send(ParcelOverdue(round=2))
        workflow.cancel(ParcelOverdue)

    Timeouts(on_arrival=hesitate)
    publish(ParcelPosted())
    deliver_due()

    publish(ParcelArrived())
    deliver_due()

    assert set(statuses_of(ParcelOverdue)) == {Status.CANCELLED}


def test_what_another_sent_to_the_instance_is_not_its_own_to_cancel() -> None:
    """A handler sends the same command, on behalf of the same instance."""
    Timeouts(on_arrival=lambda workflow: workflow.cancel(ParcelOverdue))
    publish(ParcelPosted())
    deliver_due()
    state = ParcelState.objects.get()

    @handles(RemindLater)
    def remind(message: RemindLater, context: HandlerContext) -> None:
        context.send(ParcelOverdue(round=3), delay=timedelta(hours=1))

    send(RemindLater())
    Delivery.objects.filter(message_name="tests.RemindLater").update(
        workflow_ids={"tests.ParcelState": str(state.pk)}
    )
    deliver_due()
    publish(ParcelArrived())
    deliver_due()

    overdue = Delivery.objects.filter(message_name="tests.ParcelOverdue", instance_id=state.pk)
    assert dict(overdue.values_list("sender", "status")) == {
        "tests.ParcelState": Status.CANCELLED,
        "tests.remind": Status.PENDING,
    }


def test_completion_cancels_what_waits_for_the_instance_itself_and_nothing_else() -> None:
    """E39."""
    Timeouts(on_arrival=lambda workflow: workflow.complete())
    publish(ParcelPosted(number=1), ParcelPosted(number=2))
    deliver_due()

    publish(ParcelArrived(number=1))
    deliver_due()

    ended = ParcelState.objects.get(number=1)
    own = Delivery.objects.filter(instance_id=ended.pk, sender_instance_id=ended.pk)
    assert sorted(own.values_list("status", flat=True)) == [Status.CANCELLED] * 2
    assert sorted(statuses_of(ParcelOverdue)) == [Status.CANCELLED, Status.PENDING]
    assert statuses_of(PrintLabel) == [Status.PENDING] * 2  # goes to a handler


def test_a_timeout_that_is_sent_by_the_step_that_completes_does_not_wait() -> None:
    def end(workflow: Any) -> None:
        workflow.send(ParcelOverdue(round=2), delay=timedelta(hours=5))
        workflow.complete()

    Timeouts(on_arrival=end)
    publish(ParcelPosted())
    deliver_due()

    publish(ParcelArrived())
    deliver_due()

    assert Status.PENDING not in statuses_of(ParcelOverdue)


def test_a_timeout_that_is_being_handled_is_cancelled_too() -> None:
    """E40: its run loses the race; its worker's commit is refused, and nothing of it is there."""
    reached, arrived = threading.Event(), threading.Event()

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(ParcelOverdue())

        @when(ParcelArrived, lookup="number")
        def arrive(self, message: ParcelArrived) -> None:
            self.cancel(ParcelOverdue)

        @when(ParcelOverdue)
        def complain(self, message: ParcelOverdue) -> None:
            Note.objects.create(text="complaint")
            self.state.seen.append("overdue")
            reached.set()
            arrived.wait(10)

    publish(ParcelPosted())
    deliver(delivery_of(ParcelPosted).pk)
    overdue = delivery_of(ParcelOverdue).pk
    publish(ParcelArrived())
    arrival = delivery_of(ParcelArrived).pk

    def arrive_meanwhile() -> None:
        reached.wait(10)
        deliver(arrival)
        arrived.set()

    if connection.vendor == "postgresql":
        late, _none = at_once(lambda: deliver(overdue), arrive_meanwhile)
    else:  # SQLite lets one transaction write at a time: between its claim and its run
        claimed = claim(overdue)
        assert claimed is not None
        deliver(arrival)
        arrived.set()
        late = settle(claimed, run(claimed, ()))

    assert isinstance(late, Lost)
    assert statuses_of(ParcelOverdue) == [Status.CANCELLED]
    assert (ParcelState.objects.get().seen, Note.objects.count()) == ([], 0)


# Raced with its answer


@pytest.mark.timeout(250)
def test_of_a_timeout_and_its_answer_at_the_same_moment_exactly_one_wins() -> None:
    """E41: on Postgres 200 times, each with both inside their steps at the same moment."""
    meeting = Meeting(2)

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(ParcelOverdue())

        @when(ParcelArrived, lookup="number")
        def arrive(self, message: ParcelArrived) -> None:
            meeting()
            self.cancel(ParcelOverdue)
            self.state.seen.append("arrived")
            self.send(AskCourier())
            self.complete()

        @when(ParcelOverdue)
        def complain(self, message: ParcelOverdue) -> None:
            meeting()
            self.state.seen.append("overdue")
            self.send(PrintLabel())
            self.complete()

    @handles(AskCourier)
    def ask(message: AskCourier, context: HandlerContext) -> None: ...

    prints_labels()
    rounds = 200 if connection.vendor == "postgresql" else 25

    for number in range(rounds):
        publish(ParcelPosted(number=number))
        deliver(delivery_of(ParcelPosted, status=Status.PENDING).pk)
        publish(ParcelArrived(number=number))
        racing = Delivery.objects.filter(
            status=Status.PENDING, message_name__in=["tests.ParcelArrived", "tests.ParcelOverdue"]
        )
        meeting = Meeting(2)
        deliver_at_once(*racing.values_list("pk", flat=True))

    seen = list(ParcelState.objects.values_list("seen", flat=True))
    won = {what: seen.count([what]) for what in ("arrived", "overdue")}
    assert sum(won.values()) == rounds == len(seen)
    assert set(ParcelState.objects.values_list("lifecycle", flat=True)) == {"completed"}
    assert len(statuses_of(AskCourier)) == won["arrived"]
    assert len(statuses_of(PrintLabel)) == won["overdue"]
    arrivals, timeouts = statuses_of(ParcelArrived), statuses_of(ParcelOverdue)
    assert sorted(arrivals) == [Status.HANDLED] * won["arrived"] + [Status.IGNORED] * won["overdue"]
    assert (
        sorted(timeouts)
        == [Status.CANCELLED] * won["arrived"] + [Status.HANDLED] * (won["overdue"])
    )
    assert set(Delivery.objects.values_list("attempts", "losses", "error")) == {(0, 0, "")}


# By whose clock


@pytest.mark.postgres
def test_due_times_follow_the_clock_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """E42: that of this machine may be wrong by a day."""
    local = clock.local
    monkeypatch.setattr(clock, "local", lambda: local() + timedelta(days=1))
    monkeypatch.setattr(timezone, "now", lambda: local() + timedelta(days=1))
    prints_labels()

    send(PrintLabel(), delay=timedelta(hours=1))
    deliver_due()

    waiting = delivery_of(PrintLabel)
    assert waiting.status == Status.PENDING
    assert timedelta(minutes=59) < waiting.due_at - local() <= timedelta(hours=1)


# Many of them


def test_fifty_thousand_that_wait_do_not_slow_down_the_relay() -> None:
    """The statement that takes what is due reads its partial index and nothing else."""
    prints_labels()
    send(PrintLabel(), delay=timedelta(days=3))
    multiply(delivery_of(PrintLabel), 50_000)
    send(*[PrintLabel()] * 5)

    with CaptureQueriesContext(connection) as captured:
        taken = take("default", 100, grows=True)

    statement = next(q["sql"] for q in captured if q["sql"].startswith("UPDATE"))
    plan = explain(statement)
    assert len(taken) == 5
    assert Delivery.objects.count() == 50_006
    assert "django_workflows_due" in plan
    assert not re.search(r"Seq Scan|SCAN (?!CONSTANT)", plan), plan


def multiply(delivery: Delivery, count: int) -> None:
    """So many more rows like this one."""
    is_postgres = connection.vendor == "postgresql"
    new_id = "gen_random_uuid()" if is_postgres else "lower(hex(randomblob(16)))"
    columns = [field.column for field in Delivery._meta.concrete_fields]
    values = [new_id if name in ("id", "message_id") else f"d.{name}" for name in columns]
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Delivery._meta.db_table} ({', '.join(columns)}) "
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) "
            f"SELECT {', '.join(values)} FROM {Delivery._meta.db_table} d, n"
        )
        cursor.execute("ANALYZE")


def explain(statement: str) -> str:
    """How the database runs the statement."""
    with connection.cursor() as cursor:
        explain = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
        cursor.execute(f"{explain} {statement}")
        return "\n".join(str(row[-1]) for row in cursor.fetchall())
