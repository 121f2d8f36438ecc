"""The commands: replay_messages, list_workflows and relay_messages."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone
from uuid_utils.compat import uuid7

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    attribute,
    define_workflow,
    handles,
    replaying,
    send,
    started_by,
    when,
)
from django_workflows.errors import Unrecoverable
from django_workflows.models import Delivery, Status
from tests.concurrency import wait_until
from tests.delivering import deliver_due, delivery_of
from tests.models import Note, ParcelState
from tests.processes import ROOT, environment
from tests.stored import many_failed, stored

pytestmark = pytest.mark.django_db(transaction=True)

Manage = Callable[..., "subprocess.CompletedProcess[str]"]


class PrintLabel(Command, name="tests.PrintLabel"):
    pass


class ParcelPosted(Event, name="tests.ParcelPosted"):
    number: int = 1


def run(command: str, *arguments: str) -> str:
    output = StringIO()
    call_command(command, *arguments, stdout=output)
    return output.getvalue()


def replay(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("replay_messages", "--json", *arguments))
    return result


class TestReplay:
    @pytest.mark.usefixtures("own_registry")
    def test_a_failed_delivery_is_handled_after_its_replay(self) -> None:
        is_broken = True

        @handles(PrintLabel, name="tests.print_label")
        def print_label(message: PrintLabel, context: HandlerContext) -> None:
            if is_broken:
                raise Unrecoverable("out of ink")
            Note.objects.create(text="label")

        send(PrintLabel())
        deliver_due()
        failed = delivery_of(PrintLabel).status
        is_broken = False

        result = replay("--handler", "tests.print_label")
        deliver_due()

        assert (failed, result["replayed"]) == (Status.FAILED, 1)
        assert delivery_of(PrintLabel).status == Status.HANDLED
        assert Note.objects.count() == 1

    @pytest.mark.usefixtures("own_registry")
    def test_ten_thousand_are_replayed_each_once_though_interrupted_and_repeated(self) -> None:
        handled: Counter[Any] = Counter()

        @handles(PrintLabel, name="tests.print_label")
        def print_label(message: PrintLabel, context: HandlerContext) -> None:
            handled[context.delivery_id] += 1

        many_failed(10_000, message_name="tests.PrintLabel", handler="tests.print_label", body="{}")

        first = replay("--handler", "tests.print_label", "--limit", "3000")
        rest = replay("--handler", "tests.print_label")
        again = replay("--handler", "tests.print_label")
        deliver_due(rounds=500)

        assert [run["replayed"] for run in (first, rest, again)] == [3_000, 7_000, 0]
        assert len(handled) == 10_000
        assert set(handled.values()) == {1}

    def test_without_a_status_only_what_failed_is_replayed(self) -> None:
        failed, ignored = stored(), stored(status=Status.IGNORED)

        result = replay("--all")

        assert result["replayed"] == 1
        assert Delivery.objects.get(pk=failed.pk).status == Status.PENDING
        assert Delivery.objects.get(pk=ignored.pk).status == Status.IGNORED

    def test_another_status_can_be_asked_for(self) -> None:
        stored()
        ignored = stored(status=Status.IGNORED)

        replay("--status", "ignored")

        assert [d.pk for d in Delivery.objects.filter(status=Status.PENDING)] == [ignored.pk]

    def test_ids_are_replayed_whatever_their_status_and_others_are_named(self) -> None:
        cancelled, handled = stored(status=Status.CANCELLED), stored(status=Status.HANDLED)

        result = replay(str(cancelled.pk), str(handled.pk))

        assert result["replayed"] == 1
        assert result["skipped"] == [{"id": str(handled.pk), "status": "handled"}]

    def test_filters_narrow_each_other(self) -> None:
        instance, hour_ago = uuid7(), timezone.now() - timedelta(hours=1)
        wanted = stored(instance_id=instance)
        stored(instance_id=instance, ended_at=hour_ago)
        stored(instance_id=uuid7())
        stored(instance_id=instance, message_name="orders.PickStock")

        since = (timezone.now() - timedelta(minutes=5)).isoformat()
        replay(f"--instance={instance}", "--message=orders.TakePayment", f"--since={since}")

        assert [d.pk for d in Delivery.objects.filter(status=Status.PENDING)] == [wanted.pk]

    def test_a_dry_run_says_what_would_be_replayed_and_changes_nothing(self) -> None:
        for _ in range(3):
            stored()

        result = replay("--all", "--dry-run", "--limit=2")

        assert (result["replayed"], result["would_replay"]) == (0, 2)
        assert result["groups"] == [
            {
                "handler": "orders.take_payment",
                "message": "orders.TakePayment",
                "status": "failed",
                "deliveries": 2,
            }
        ]
        assert not Delivery.objects.exclude(status=Status.FAILED).exists()

    def test_it_says_what_it_did(self) -> None:
        stored()
        stored()

        output = run("replay_messages", "--all")

        assert output.startswith("Replayed 2 deliveries.")
        assert "orders.take_payment" in output
        assert "\x1b" not in output

    def test_an_interruption_says_how_far_it_came(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replaying, "BATCH", 1)
        for _ in range(2):
            stored()
        note = replaying._replay_batch

        def interrupted_at_the_second(ids: Any) -> Any:
            if Delivery.objects.filter(status=Status.PENDING).exists():
                raise KeyboardInterrupt
            return note(ids)

        monkeypatch.setattr(replaying, "_replay_batch", interrupted_at_the_second)

        with pytest.raises(CommandError, match="Interrupted; 1 delivery had been replayed") as said:
            run("replay_messages", "--all")

        assert said.value.returncode == 130

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ([], "Say what to replay: give ids or a filter"),
            (["--limit=3"], "Say what to replay"),
            (["--handler=orders.take_paymnt"], "Did you mean orders.take_payment?"),
            (["--workflow=orders.take_payment"], "No workflow is named 'orders.take_payment'"),
            (["--message=orders.TakePaymnt"], "Did you mean orders.TakePayment?"),
            (["--handler=zzz"], "No handler is named 'zzz'. list_workflows shows what there is."),
            (["--since=2026-03-01T09:00"], "has no time zone. Write 2026-03-01T09:00Z"),
            (["--since=yesterday"], "'yesterday' is not a time"),
            (["--since=2026-03-02T00:00Z", "--until=2026-03-01T00:00Z"], "is not before --until"),
            (["--status=handled"], "invalid choice: 'handled'"),
            (["--all", "--limit=0"], "'0' is not a whole number of at least 1"),
            (["--instance=1"], "'1' is not a UUID"),
            (["0193b1c3-0000-7000-8000-000000000000"], "No delivery has the id 0193b1c3-"),
        ],
    )
    def test_bad_input_gets_one_clear_sentence_and_replays_nothing(
        self, arguments: list[str], sentence: str
    ) -> None:
        stored()

        with pytest.raises(CommandError) as said:
            run("replay_messages", *arguments)

        assert sentence in str(said.value)
        assert not Delivery.objects.exclude(status=Status.FAILED).exists()

    def test_a_terminal_sees_a_progress_bar(self, database_url: str) -> None:
        stored()

        output = on_a_terminal(database_url, "replay_messages", "--all")

        assert "1/1" in output
        assert "Replayed 1 delivery." in output


def on_a_terminal(database_url: str, *arguments: str) -> str:
    """What manage.py writes to a terminal."""
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment(database_url, "db://", {"TERM": "xterm"}),
        stdin=subprocess.DEVNULL,
        stdout=its_end,
    )
    os.close(its_end)
    output = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other end has closed it
        while chunk := os.read(terminal, 4096):
            output += chunk
    os.close(terminal)
    assert process.wait(timeout=30) == 0
    return output.decode()


@pytest.mark.usefixtures("own_registry")
class TestList:
    def test_workflows_are_listed_with_their_steps_in_order(self) -> None:
        def number_of(message: ParcelPosted) -> int:
            return message.number

        class Parcels(Workflow[ParcelState], queue="slow"):
            @started_by(ParcelPosted, once_per="order_id", lookup=attribute("order"))
            def begin(self, message: ParcelPosted) -> None: ...

            @when(ParcelPosted, lookup=number_of, maps_to="number", if_missing="retry")
            def go_on(self, message: ParcelPosted) -> None: ...

            @when(PrintLabel)
            def print_label(self, message: PrintLabel) -> None: ...

        [workflow] = json.loads(run("list_workflows", "--json"))["workflows"]

        assert (workflow["name"], workflow["state"]) == ("tests.ParcelState",) * 2
        assert workflow["queue"] == "slow"
        assert workflow["declared_as"].endswith("Parcels")
        assert "customer" in workflow["fields"]
        begin, go_on, print_label = workflow["steps"]
        assert (begin["step"], begin["starts"]) == ("begin", True)
        assert (begin["once_per"], begin["lookup"]) == ("order_id", "attribute order")
        assert (go_on["message"], go_on["kind"]) == ("tests.ParcelPosted", "event")
        assert (go_on["maps_to"], go_on["if_missing"]) == ("number", "retry")
        assert go_on["lookup"].endswith("number_of")
        assert (print_label["lookup"], print_label["kind"]) == (None, "command")

    def test_plain_handlers_are_listed(self) -> None:
        handles(PrintLabel, name="tests.print", atomic=False, queue="q")(lambda m, c: None)

        [handler] = json.loads(run("list_workflows", "--json"))["handlers"]

        assert (handler["name"], handler["message"]) == ("tests.print", "tests.PrintLabel")
        assert (handler["queue"], handler["atomic"]) == ("q", False)

    def test_the_table_says_which_instance_a_step_is_for(self) -> None:
        parcels = define_workflow(ParcelState)
        parcels.started_by(ParcelPosted)(lambda m, s, c: None)
        parcels.when(ParcelPosted, lookup="number", if_missing="fail")(lambda m, s, c: None)

        output = run("list_workflows")

        assert "always a new one" in output
        assert "number = message.number, else fail" in output
        assert "functions, queue default" in output

    def test_nothing_declared_says_where_to_declare(self) -> None:
        output = run("list_workflows")

        assert "Nothing is declared." in output


class TestRelay:
    def test_the_database_broker_needs_none_and_it_says_so(self, manage: Manage) -> None:
        done = manage("relay_messages", broker_url="db://")

        assert "no relay is needed" in done.stdout

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_hands_due_deliveries_over_until_it_is_told_to_stop(
        self, number: signal.Signals, database_url: str, redis_url: str
    ) -> None:
        delivery = stored(status=Status.PENDING, body=json.dumps({"order_id": str(uuid4())}))
        process = subprocess.Popen(
            [sys.executable, "manage.py", "relay_messages"],
            cwd=ROOT,
            env=environment(database_url, redis_url, {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

        try:
            handed_over = wait_until(lambda: messages_in(redis_url), timeout=30)
            process.send_signal(number)
            output, _ = process.communicate(timeout=15)
        finally:
            process.kill()
            process.wait()

        assert str(delivery.pk) in handed_over
        assert process.returncode == 0
        assert "Relaying due deliveries to the RedisBroker" in output
        assert "The relay has ended." in output


def messages_in(redis_url: str) -> str:
    """What Dramatiq has put into Redis."""
    import redis

    assert urlsplit(redis_url).scheme == "redis"
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        return "".join(str(client.hgetall(key)) for key in client.keys("*.msgs"))
