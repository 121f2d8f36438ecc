"""prune_workflows: what has ended long ago is deleted, and nothing else."""

import json
import os
import pty
import resource
import subprocess
import sys
from datetime import datetime, timedelta
from io import StringIO
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from uuid_utils.compat import uuid7

from django_workflows import (
    Command,
    Event,
    define_workflow,
    dispatch,
    handles,
    pruning,
)
from django_workflows.models import Delivery, Lifecycle, Status, WorkflowState
from django_workflows.pruning import Pruned, Terms, prune
from tests.concurrency import at_once
from tests.models import (
    Copy,
    FolderState,
    InvoiceState,
    Letter,
    LetterState,
    ParcelState,
    Receipt,
)
from tests.processes import ROOT, environment
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

LONG_AGO = timedelta(days=100)
RECENTLY = timedelta(days=10)
PARCELS = "tests.ParcelState"
INVOICES = "tests.InvoiceState"


class Started(Event, name="tests.Started"):
    pass


class Printed(Command, name="tests.Printed"):
    pass


@pytest.fixture(autouse=True)
def declared(own_registry: Any) -> None:
    for state in (ParcelState, InvoiceState, LetterState, FolderState):
        define_workflow(state).started_by(Started)(lambda message, state, context: None)
    handles(Printed, name="tests.print")(lambda message, context: None)


def id_of(moment: datetime) -> UUID:
    return uuid7(nanoseconds=int(moment.timestamp() * 1e9))


def instance(
    ago: timedelta = LONG_AGO,
    state: type[WorkflowState] = ParcelState,
    lifecycle: Lifecycle = Lifecycle.COMPLETED,
    **fields: Any,
) -> Any:
    """One that was started, and has ended if it is not live, so long ago."""
    moment = timezone.now() - ago
    made = state(id=id_of(moment), lifecycle=lifecycle, started_at=moment, **fields)
    made.ended_at = None if made.is_live else moment
    made.save(force_insert=True)
    return made


def delivery(ago: timedelta = LONG_AGO, status: Status = Status.HANDLED, **fields: Any) -> Delivery:
    """One to a plain handler, unless `to` is an instance; made, and ended, so long ago."""
    moment = timezone.now() - ago
    to, by = fields.pop("to", None), fields.pop("by", None)
    if to is not None:
        fields.update(handler=to._meta.label, message_name="tests.Started", instance_id=to.pk)
    if by is not None:
        fields.update(sender=by._meta.label, sender_instance_id=by.pk)
    given = {
        "handler": "tests.print",
        "message_name": "tests.Printed",
        "created_at": moment,
        "due_at": moment,
        **fields,
    }
    if status in (Status.HANDLED, Status.IGNORED, Status.CANCELLED, Status.FAILED):
        given.setdefault("ended_at", moment)
    if status == Status.NOTED:
        given["ended_at"] = None
    return stored(id=id_of(moment), status=status, **given)


def run(*arguments: str) -> dict[str, Any]:
    output = StringIO()
    call_command("prune_workflows", "--json", *arguments, stdout=output)
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def exists(row: Any) -> bool:
    return bool(type(row)._base_manager.filter(pk=row.pk).exists())


class TestInstances:
    def test_an_ended_instance_goes_with_the_deliveries_to_it(self) -> None:
        old = instance()
        theirs = [delivery(to=old), delivery(to=old, status=Status.IGNORED)]
        theirs.append(delivery(to=old, status=Status.CANCELLED))

        result = run()

        assert (result["instances"], result["deliveries"]) == (1, 3)
        assert not any(map(exists, (old, *theirs)))

    @pytest.mark.parametrize(
        "lifecycle", [Lifecycle.COMPLETED, Lifecycle.COMPENSATED, Lifecycle.CANCELLED]
    )
    def test_however_it_ended(self, lifecycle: Lifecycle) -> None:
        old = instance(lifecycle=lifecycle)

        run()

        assert not exists(old)

    def test_one_that_ended_recently_stays_with_its_deliveries(self) -> None:
        recent = instance(RECENTLY)
        # It ran for long: its first delivery is old.
        theirs = delivery(to=recent)

        result = run()

        assert (result["instances"], result["deliveries"]) == (0, 0)
        assert exists(recent)
        assert exists(theirs)

    @pytest.mark.parametrize(
        "lifecycle", [Lifecycle.RUNNING, Lifecycle.COMPENSATING, Lifecycle.FAILED]
    )
    def test_a_live_one_stays_with_all_that_it_got_and_sent(self, lifecycle: Lifecycle) -> None:
        live = instance(lifecycle=lifecycle)
        got = [delivery(to=live, status=status) for status in pruning.ENDED]
        sent = [delivery(by=live), delivery(by=live, status=Status.NOTED, undoes=True)]

        run("--older-than", "0", "--failed")

        assert all(map(exists, (live, *got, *sent)))

    @pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.NOTED])
    def test_one_with_an_unfinished_delivery_stays(self, status: Status) -> None:
        old = instance()
        unfinished, handled = delivery(to=old, status=status), delivery(to=old)

        result = run("--failed")

        assert all(map(exists, (old, unfinished, handled)))
        assert [kept["reason"] for kept in result["kept"]] == ["a delivery to it is not finished"]

    def test_one_that_has_noted_something_to_undo_stays(self) -> None:
        old = instance()
        noted = delivery(by=old, status=Status.NOTED, undoes=True)

        run("--failed")

        assert exists(old)
        assert exists(noted)

    def test_one_with_a_failed_delivery_stays_unless_asked_for(self) -> None:
        reached, sender = instance(), instance()
        failed = delivery(to=reached, status=Status.FAILED)
        sent = delivery(by=sender, status=Status.FAILED)
        rows = (reached, sender, failed, sent)

        run()
        stayed = [exists(row) for row in rows]
        run("--failed")

        assert stayed == [True] * 4
        assert [exists(row) for row in rows] == [False] * 4

    def test_a_state_has_a_retention_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(InvoiceState, "workflow_retention", timedelta(days=5))
        monkeypatch.setattr(ParcelState, "workflow_retention", timedelta(days=200))
        invoice, parcel = instance(RECENTLY, InvoiceState), instance()
        theirs = [delivery(RECENTLY, to=invoice), delivery(to=parcel)]

        run()

        assert not exists(invoice)
        assert exists(parcel)
        assert [exists(row) for row in theirs] == [False, True]

    def test_a_retention_may_be_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ParcelState, "workflow_retention", timedelta.max)
        parcel, ignored = instance(), delivery(handler=PARCELS, status=Status.IGNORED)

        run()

        assert exists(parcel)
        assert exists(ignored)

    @override_settings(DJANGO_WORKFLOWS={"RETENTION": timedelta(days=5)})
    def test_the_setting_is_for_all_others(self) -> None:
        recent = instance(RECENTLY)

        run()

        assert not exists(recent)

    def test_older_than_wins_over_every_retention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(InvoiceState, "workflow_retention", timedelta(days=1000))
        rows = [instance(RECENTLY, InvoiceState), instance(RECENTLY), delivery(RECENTLY)]
        newer = instance(timedelta(days=8))

        run("--older-than", "9")

        assert not any(map(exists, rows))
        assert exists(newer)

    def test_of_one_workflow_only(self) -> None:
        parcel, invoice = instance(), instance(state=InvoiceState)
        plain, lost = delivery(), delivery(handler=INVOICES, status=Status.IGNORED)

        run("--workflow", INVOICES)

        assert [exists(row) for row in (parcel, plain, invoice, lost)] == [True, True, False, False]


class TestRowsThatRefer:
    def test_what_cascades_goes_too(self) -> None:
        old = instance(state=LetterState)
        letter = Letter.objects.create(state=old)

        run()

        assert not exists(letter)
        assert not exists(old)

    @pytest.mark.parametrize("model", [Receipt, Copy])
    def test_a_protected_instance_stays_and_is_named_and_the_others_go(
        self, model: type[Receipt | Copy]
    ) -> None:
        held, *others = [instance(state=LetterState) for _ in range(3)]
        theirs = delivery(to=held)
        row = model.objects.create(state=held)

        result = run()

        assert exists(held)
        assert exists(theirs)
        assert not any(map(exists, others))
        assert result["instances"] == 2
        assert result["kept"] == [
            {
                "workflow": "tests.LetterState",
                "reason": "another row refers to it and is protected",
                "instances": 1,
            }
        ]
        row.delete()

    def test_an_instance_of_another_workflow_never_goes_by_a_cascade(self) -> None:
        old = instance(state=LetterState)
        live = instance(state=FolderState, lifecycle=Lifecycle.RUNNING, letter=old)

        result = run()

        assert exists(live)
        assert exists(old)
        assert "tests.FolderState would go with it" in result["kept"][0]["reason"]

    def test_it_goes_once_that_instance_has_gone(self) -> None:
        old = instance(state=LetterState)
        ended = instance(state=FolderState, letter=old)

        run()
        run()

        assert not exists(ended)
        assert not exists(old)


class TestDeliveries:
    def test_one_to_a_plain_handler_goes_by_its_own_age(self) -> None:
        old = [delivery(status=status) for status in pruning.ENDED]
        recent = delivery(RECENTLY)

        result = run()

        assert result["deliveries_to"] == {"tests.print": 3}
        assert not any(map(exists, old))
        assert exists(recent)

    def test_its_age_is_that_of_its_end(self) -> None:
        late = delivery(ended_at=timezone.now() - RECENTLY)

        run()

        assert exists(late)

    @pytest.mark.parametrize("status", pruning.UNFINISHED)
    def test_an_unfinished_one_stays(self, status: Status) -> None:
        unfinished = delivery(status=status)

        run("--failed", "--older-than", "0")

        assert exists(unfinished)

    def test_a_failed_one_stays_unless_asked_for(self) -> None:
        failed = delivery(status=Status.FAILED)

        run()
        stayed = exists(failed)
        run("--failed")

        assert stayed
        assert not exists(failed)

    def test_one_that_found_no_instance_goes(self) -> None:
        ignored = delivery(handler=PARCELS, status=Status.IGNORED)

        run()

        assert not exists(ignored)

    def test_one_whose_instance_is_gone_goes(self) -> None:
        late = delivery(handler=PARCELS, instance_id=uuid7(), status=Status.IGNORED)

        run()

        assert not exists(late)

    def test_one_of_an_unknown_workflow_stays(self) -> None:
        unknown = delivery(handler="gone.State", instance_id=uuid7())

        run()

        assert exists(unknown)

    def test_one_that_an_ended_instance_sent_goes(self) -> None:
        sent = delivery(by=instance(RECENTLY))

        run()

        assert not exists(sent)

    def test_one_that_is_replayed_meanwhile_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = delivery(status=Status.IGNORED)
        seen = pruning._without_kept

        def replay_first(rows: Any) -> Any:
            Delivery.objects.filter(pk=failed.pk).replay()
            return seen(rows)

        monkeypatch.setattr(pruning, "_without_kept", replay_first)

        run()

        assert exists(failed)


class TestTheCommand:
    def test_a_dry_run_says_the_same_and_deletes_nothing(self) -> None:
        old = instance()
        rows = [old, delivery(to=old), delivery(), instance(state=LetterState)]

        foretold = run("--dry-run")
        stayed = [exists(row) for row in rows]
        done = run()

        assert stayed == [True] * 4
        assert {**foretold, "dry_run": False} == done
        assert (done["instances"], done["deliveries"]) == (2, 2)

    def test_it_takes_many_batches(self) -> None:
        for _ in range(7):
            delivery(to=instance())
            delivery()

        result = run("--batch", "2")

        assert (result["instances"], result["deliveries"]) == (7, 14)

    def test_a_limit_is_for_instances_and_deliveries_together(self) -> None:
        for _ in range(3):
            delivery(to=instance())
            delivery()

        first, second = run("--limit", "4"), run("--limit", "4")

        assert (first["instances"], first["deliveries"]) == (3, 4)
        assert (second["instances"], second["deliveries"]) == (0, 2)

    def test_an_interrupted_run_keeps_what_it_did_and_can_be_repeated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(4):
            instance()
        whole = pruning._held

        def interrupted(*arguments: Any) -> Any:
            if ParcelState.objects.count() == 2:
                raise KeyboardInterrupt
            return whole(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(pruning, "_held", interrupted)
            with pytest.raises(CommandError, match="2 instances and 0 deliveries") as caught:
                run("--batch", "1")
        left = ParcelState.objects.count()
        result = run()

        assert caught.value.returncode == 130
        assert (left, result["instances"]) == (2, 2)

    def test_it_says_what_it_did(self) -> None:
        delivery(to=instance())
        delivery(to=instance(), status=Status.FAILED)
        output = StringIO()

        call_command("prune_workflows", stdout=output)

        text = output.getvalue()
        assert "Deleted 1 instance and 1 delivery." in text
        assert "tests.ParcelState" in text
        assert "1 of tests.ParcelState stay: a delivery to it, or of it, has failed." in text

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--workflow", "tests.ParcelStat"], "Did you mean tests.ParcelState?"),
            (["--workflow", "tests.print"], "No workflow is named 'tests.print'"),
            (["--older-than", "-1"], "not a number of days"),
            (["--older-than", "nan"], "not a number of days"),
            (["--batch", "0"], "not a whole number from 1 to 10,000"),
            (["--limit", "x"], "not a whole number"),
        ],
    )
    def test_nonsense_is_refused(self, arguments: list[str], said: str) -> None:
        with pytest.raises(CommandError, match=said.replace("?", r"\?")):
            run(*arguments)

    def test_a_terminal_sees_progress(self, database_url: str) -> None:
        instance()
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "manage.py", "prune_workflows"],
            cwd=ROOT,
            env={**environment(database_url, "db://", {}), "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=slave,
        )
        os.close(slave)
        process.wait(timeout=60)
        shown = os.read(master, 100_000).decode()
        os.close(master)

        assert "looking" in shown
        assert "Deleted 0 instances and 0 deliveries." in shown  # nothing of tests is declared


class TestAtScale:
    def test_a_batch_takes_the_same_few_statements_however_large(self) -> None:
        for _ in range(30):
            delivery(to=instance())

        def statements(batch: int) -> int:
            with CaptureQueriesContext(
                connection,
            ) as captured:
                prune(Terms(batch=batch, limit=batch))
            return len(captured)

        assert statements(20) == statements(2)

    def test_20_000_instances_with_their_deliveries_go_and_as_many_stay(self) -> None:
        fill(20_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        result = run()

        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (result["instances"], result["deliveries"]) == (20_000, 40_000)
        assert ParcelState.objects.count() == 200
        assert Delivery.objects.count() == 400
        assert grown_kb < 50_000

    @pytest.mark.postgres
    def test_two_at_once_delete_everything_once(self) -> None:
        fill(2_000)

        first, second = at_once(lambda: prune(Terms(batch=100)), lambda: prune(Terms(batch=100)))
        rest = prune(Terms())

        total = Counted(first, second, rest)
        assert total.instances == 2_000
        assert ParcelState.objects.count() == 20

    def test_what_is_delivered_meanwhile_is_not_disturbed(self) -> None:
        fill(3_000)
        pending = [delivery(timedelta(0), status=Status.PENDING, body="{}").pk for _ in range(50)]

        pruned, *endings = at_once(
            lambda: prune(Terms(batch=200)),
            lambda: [dispatch.deliver(pk) for pk in pending],
        )

        assert pruned.instances.total() == 3_000
        assert [type(ending).__name__ for ending in endings[0]] == ["Handled"] * 50


class Counted:
    def __init__(self, *parts: Pruned) -> None:
        self.instances = sum(part.instances.total() for part in parts)


def fill(count: int) -> None:
    """So many old, ended instances with two deliveries each, and a hundredth as many live ones."""
    for ago, number, lifecycle in (
        (LONG_AGO, count, Lifecycle.COMPLETED),
        (LONG_AGO, count // 100, Lifecycle.RUNNING),
    ):
        moment = timezone.now() - ago
        instances = [
            ParcelState(
                id=id_of(moment),
                lifecycle=lifecycle,
                version=1,
                started_at=moment,
                ended_at=None if lifecycle == Lifecycle.RUNNING else moment,
            )
            for _ in range(number)
        ]
        ParcelState.objects.bulk_create(instances, batch_size=2_000)
        Delivery.objects.bulk_create(
            (
                Delivery(
                    id=id_of(moment),
                    message_id=uuid7(),
                    message_name="tests.Started",
                    body="{}",
                    correlation_id=made.pk,
                    handler=PARCELS,
                    instance_id=made.pk,
                    status=Status.HANDLED,
                    created_at=moment,
                    due_at=moment,
                    ended_at=moment,
                )
                for made in instances
                for _ in range(2)
            ),
            batch_size=1_000,
        )
