"""How things stand: the figures, that they stay cheap, and the command for monitoring."""

import json
import re
from datetime import datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from uuid_utils.compat import uuid7

from django_workflows import Command, Event, define_workflow, handles, status
from django_workflows.models import Delivery, Lifecycle, Status, Worker
from django_workflows.status import Figure, Overview, overview
from tests.models import InvoiceState, ParcelState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

PARCELS = "tests.ParcelState"
MINUTE = timedelta(minutes=1)


class Started(Event, name="tests.Started"):
    pass


class Printed(Command, name="tests.Printed"):
    pass


@pytest.fixture(autouse=True)
def declared(own_registry: Any) -> None:
    define_workflow(ParcelState).started_by(Started)(lambda message, state, context: None)
    define_workflow(InvoiceState).started_by(Started)(lambda message, state, context: None)
    handles(Printed, name="tests.print", aliases=["tests.old_print"])(lambda message, context: None)


def parcel(lifecycle: Lifecycle = Lifecycle.RUNNING, ago: timedelta = MINUTE) -> ParcelState:
    began = timezone.now() - ago
    made = ParcelState(
        id=uuid7(nanoseconds=int(began.timestamp() * 1e9)), lifecycle=lifecycle, started_at=began
    )
    made.ended_at = None if made.is_live else began
    made.save()
    return made


def pending(due_ago: timedelta, handler: str = "tests.print", **fields: Any) -> Delivery:
    due_at = timezone.now() - due_ago
    return stored(
        status=Status.PENDING, handler=handler, due_at=due_at, **{"relay_at": due_at, **fields}
    )


def handled(at: datetime, status: Status = Status.HANDLED, **fields: Any) -> Delivery:
    return stored(status=status, ended_at=at, **{"handler": "tests.print", **fields})


def worker(ago: timedelta = timedelta(0), **fields: Any) -> Worker:
    moment = timezone.now() - ago
    given = {"host": "a", "pid": 1, "queues": ["default"], "relays": True, **fields}
    return Worker.objects.create(started_at=moment, seen_at=moment, **given)


def parcels(seen: Overview) -> status.Workflow:
    return next(workflow for workflow in seen.workflows if workflow.name == PARCELS)


def printing(seen: Overview) -> status.Recipient:
    return next(handler for handler in seen.handlers if handler.name == "tests.print")


class TestInstances:
    def test_they_are_counted_by_lifecycle(self) -> None:
        for lifecycle in (*Lifecycle, Lifecycle.RUNNING, Lifecycle.COMPLETED):
            parcel(lifecycle)

        counts = parcels(overview()).instances

        assert {str(key): figure.value for key, figure in counts.items()} == {
            "running": 2,
            "compensating": 1,
            "failed": 1,
            "completed": 2,
            "compensated": 1,
            "cancelled": 1,
        }
        assert not any(figure.is_estimate for figure in counts.values())

    def test_the_oldest_running_one_is_named(self) -> None:
        parcel(Lifecycle.COMPLETED, ago=timedelta(days=3))
        oldest = parcel(ago=timedelta(days=2))
        parcel(ago=timedelta(days=1))

        seen = parcels(overview())

        assert (seen.oldest_running_id, seen.oldest_running_at) == (oldest.pk, oldest.started_at)

    def test_of_very_many_the_oldest_is_named_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status, "BOUND", 3)
        for days in (1, 2, 9, 3, 4):
            parcel(ago=timedelta(days=days))

        age = overview().age(parcels(overview()).oldest_running_at)

        assert age is not None
        assert age.days == 9

    def test_beyond_the_bound_there_are_at_least_so_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status, "BOUND", 3)
        for _ in range(5):
            parcel()

        assert parcels(overview()).instances[Lifecycle.RUNNING] == Figure(3, True, True)

    @pytest.mark.postgres
    def test_beyond_the_bound_postgres_estimates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status, "BOUND", 3)
        for _ in range(8):
            parcel()
        parcel(Lifecycle.COMPLETED)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {ParcelState._meta.db_table}")

        counts = parcels(overview()).instances

        assert counts[Lifecycle.RUNNING] == Figure(8, is_estimate=True)
        assert counts[Lifecycle.COMPLETED] == Figure(1)


class TestDeliveries:
    def test_what_waits_is_due_overdue_running_and_failed(self) -> None:
        pending(-timedelta(hours=1))
        pending(timedelta(seconds=20))
        pending(timedelta(minutes=3))
        stored(status=Status.RUNNING, handler="tests.print")
        stored(status=Status.FAILED, handler="tests.print")
        for ended in (Status.HANDLED, Status.IGNORED, Status.CANCELLED, Status.NOTED):
            stored(status=ended, handler="tests.print")

        backlog = printing(overview()).backlog

        figures = (backlog.waiting, backlog.due, backlog.overdue, backlog.running, backlog.failed)
        assert [str(figure) for figure in figures] == ["1", "2", "1", "1", "1"]

    def test_the_oldest_due_one_sets_the_age(self) -> None:
        pending(timedelta(minutes=3))
        pending(timedelta(minutes=9), PARCELS)

        seen = overview()

        ages = [
            seen.age(backlog.oldest_due_at)
            for backlog in (seen.backlog, parcels(seen).backlog, printing(seen).backlog)
        ]
        assert [age and round(age / MINUTE) for age in ages] == [9, 9, 3]

    def test_one_that_was_handed_over_and_not_taken_is_still_due(self) -> None:
        pending(timedelta(minutes=9), relay_at=timezone.now() + timedelta(minutes=5))

        assert printing(overview()).backlog.overdue == Figure(1)

    def test_those_of_every_queue_are_counted(self) -> None:
        for queue in ("slow", "default", "gone"):
            pending(timedelta(minutes=2), queue=queue)

        assert printing(overview()).backlog.due == Figure(3)

    def test_an_alias_counts_as_its_handler(self) -> None:
        pending(MINUTE, "tests.old_print")

        assert printing(overview()).backlog.due == Figure(1)

    def test_what_is_not_declared_any_more_is_listed(self) -> None:
        stored(handler="gone.away")

        gone = overview().handlers[-1]

        assert (gone.name, gone.backlog.failed) == ("gone.away", Figure(1))

    def test_of_one_workflow_only(self) -> None:
        pending(MINUTE)
        pending(MINUTE, PARCELS)
        chosen = [w for w in status.registry.current().workflows if w.name == PARCELS]

        seen = overview(workflows=chosen)

        assert [w.name for w in seen.workflows] == [PARCELS]
        assert seen.handlers == []
        assert seen.backlog.due == Figure(1)

    def test_beyond_the_bound_there_are_at_least_so_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status, "BOUND", 3)
        monkeypatch.setattr(status, "SAMPLED_PAGES", 0)
        for _ in range(6):
            pending(MINUTE)

        due = printing(overview()).backlog.due

        assert due == Figure(4, is_estimate=True, is_minimum=True)

    @pytest.mark.postgres
    def test_beyond_the_bound_pages_of_the_table_are_sampled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status, "BOUND", 3)
        for _ in range(6):
            pending(MINUTE)
            pending(MINUTE, PARCELS)

        seen = overview()

        # The table is small, so that the sample is all of it.
        assert printing(seen).backlog.due == Figure(6, is_estimate=True)
        assert parcels(seen).backlog.due == Figure(6, is_estimate=True)


class TestCharts:
    def test_each_minute_and_hour_has_what_ended_in_it(self) -> None:
        now = timezone.now()
        this_hour = now.replace(minute=0, second=0, microsecond=0)
        for at in (now - 5 * MINUTE, now - 5 * MINUTE, this_hour - timedelta(hours=3)):
            handled(at)
        handled(now - 5 * MINUTE, Status.FAILED)
        handled(now - timedelta(days=2))

        seen = overview()

        minutes = {bar.start: bar for bar in seen.minutes}
        minute = minutes[(now - 5 * MINUTE).replace(second=0, microsecond=0)]
        assert (minute.handled, minute.failed) == (Figure(2), Figure(1))
        assert sum(bar.handled.value for bar in seen.minutes) == 2
        hours = {bar.start: bar.handled.value for bar in seen.hours}
        assert hours[this_hour - timedelta(hours=3)] == 1
        assert sum(hours.values()) == 3

    def test_there_are_as_many_bars_when_nothing_happened(self) -> None:
        seen = overview()

        assert (len(seen.minutes), len(seen.hours)) == (status.MINUTES, status.HOURS)
        assert len(parcels(seen).minutes) == status.MINUTES
        assert seen.minutes[-1].start <= seen.at < seen.minutes[-1].start + MINUTE

    def test_each_workflow_and_handler_has_its_own(self) -> None:
        handled(timezone.now() - 5 * MINUTE)
        handled(timezone.now() - 5 * MINUTE, handler=PARCELS)

        seen = overview()

        for recipient in (parcels(seen), printing(seen)):
            assert sum(bar.handled.value for bar in recipient.minutes) == 1
        assert sum(bar.handled.value for bar in seen.minutes) == 2

    def test_a_busy_bar_is_drawn_on_at_the_rate_of_its_beginning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status, "BAR_BOUND", 10)
        start = timezone.now().replace(second=0, microsecond=0) - 5 * MINUTE
        for second in range(60):
            handled(start + timedelta(seconds=second))

        busy = next(bar for bar in overview().minutes if bar.start == start)

        assert busy.handled.is_estimate
        assert 55 <= busy.handled.value <= 70

    def test_a_burst_at_the_start_of_a_minute_is_counted(self) -> None:
        start = timezone.now().replace(second=0, microsecond=0) - 5 * MINUTE
        for number in range(400):
            handled(start + timedelta(milliseconds=number))

        burst = next(bar for bar in overview().minutes if bar.start == start)

        assert burst.handled == Figure(400)


class TestWorkers:
    def test_those_seen_lately_work(self) -> None:
        here = worker()
        relay = worker(pid=2, queues=[])
        helper = worker(pid=3, relays=False)
        worker(timedelta(minutes=2), pid=4)

        seen = overview()

        assert set(seen.workers_seen_lately) == {here, helper}
        assert set(seen.relays_seen_lately) == {here, relay}
        assert len(seen.workers) == 4


class TestTheCost:
    def test_it_takes_few_statements_however_many_workflows_and_rows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(status, "BOUND", 1)
        for _ in range(3):
            parcel()
            pending(MINUTE)
            handled(timezone.now())

        with CaptureQueriesContext(connection) as captured:
            overview()

        assert len(captured) <= 8

    def test_no_statement_reads_a_whole_table(self) -> None:
        if connection.vendor != "postgresql":
            pytest.skip("the plans are those of Postgres")
        with connection.cursor() as cursor:
            cursor.execute("SET enable_seqscan = off")
        try:
            with CaptureQueriesContext(connection) as captured:
                overview()
            with connection.cursor() as cursor:
                plans = []
                for query in captured:
                    if "django_workflows_worker" not in query["sql"]:
                        cursor.execute(f"EXPLAIN {query['sql']}")
                        plans += [row[0] for row in cursor.fetchall()]
        finally:
            connection.close()

        assert plans
        assert not [line for line in plans if "Seq Scan" in line]


class TestTheCommand:
    def run(self, *arguments: str) -> str:
        output = StringIO()
        call_command("workflows_status", *arguments, stdout=output)
        return output.getvalue()

    def refused(self, *arguments: str) -> str:
        with pytest.raises(CommandError) as caught:
            self.run(*arguments)
        assert caught.value.returncode == 1
        return str(caught.value)

    def test_a_table_is_for_people(self) -> None:
        parcel(ago=timedelta(days=2, hours=3, minutes=1))
        pending(timedelta(minutes=3, seconds=4))
        worker()

        text = self.run()

        assert "2 d 3 h" in text
        assert "3 min 4 s" in text
        assert "tests.print" in text  # every handler, though it has nothing to do
        assert "minute, so far" in text
        assert "1 worker process and 1 that look for what is due, on 1 machine." in text

    def test_json_is_for_programs(self) -> None:
        oldest = parcel()
        pending(timedelta(minutes=3))
        stored(handler=PARCELS)

        seen = json.loads(self.run("--json"))

        workflow = next(w for w in seen["workflows"] if w["name"] == PARCELS)
        counted = {"value": 1, "is_estimate": False, "is_minimum": False}
        assert workflow["instances"]["running"] == counted
        assert workflow["oldest_running"]["id"] == str(oldest.pk)
        assert workflow["deliveries"]["failed"] == counted
        assert seen["deliveries"]["overdue"] == counted
        assert 180 <= seen["deliveries"]["oldest_due_seconds"] < 200
        assert seen["beyond_limits"] == []
        assert len(seen["minutes"]) == status.MINUTES

    def test_within_all_limits_it_is_content(self) -> None:
        parcel(Lifecycle.FAILED)
        parcel()
        pending(MINUTE)
        stored(handler=PARCELS)
        worker()

        self.run(
            "--max-overdue=90", "--max-due=1", "--max-failed=1", "--max-failed-instances=1",
            "--max-age=90", "--need-workers",
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("limit", "said"),
        [
            ("--max-overdue=50", r"has been due for 6\d s, and --max-overdue is 50 s\."),
            ("--max-due=0", "1 deliveries are due and not taken, and --max-due is 0."),
            ("--max-failed=0", "1 deliveries have failed, and --max-failed is 0."),
            ("--max-failed-instances=0", "1 instances have failed, and --max-failed-instances is"),
            ("--max-age=50", r"has been running for 6\d s, and --max-age is 50 s\."),
            ("--need-workers", "No worker has been seen lately; the last was a 1, 2 min"),
        ],
    )
    def test_beyond_a_limit_it_says_which_and_ends_with_1(self, limit: str, said: str) -> None:
        parcel(Lifecycle.FAILED)
        parcel()
        pending(MINUTE)
        stored(handler=PARCELS)
        worker(timedelta(seconds=125))

        assert re.search(said, self.refused(limit))

    def test_what_is_not_looked_for_is_missed(self) -> None:
        worker(relays=False)

        assert "Nobody who looks for what is due" in self.refused("--need-workers")

    def test_the_limits_are_for_the_chosen_workflow(self) -> None:
        stored(handler="tests.print")

        self.run("--max-failed=0", "--workflow", PARCELS)

    def test_json_is_printed_beyond_a_limit_too(self) -> None:
        stored(handler=PARCELS)
        output = StringIO()

        with pytest.raises(CommandError):
            call_command("workflows_status", "--json", "--max-failed=0", stdout=output)

        assert json.loads(output.getvalue())["beyond_limits"] == [
            "1 deliveries have failed, and --max-failed is 0."
        ]

    @pytest.mark.parametrize("given", ["--max-age=-1", "--max-failed=x", "--max-overdue=inf"])
    def test_nonsense_is_refused(self, given: str) -> None:
        with pytest.raises(CommandError, match="is not a"):
            self.run(given)
