"""Handlers with `atomic=False`: no transaction while they run; what they send leaves at the end."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_workflows import Command, HandlerContext, handles, send
from django_workflows.dispatch import deliver
from django_workflows.endings import Handled, Lost
from django_workflows.models import Delivery, Status
from tests.concurrency import wait_until
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import Note

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class CallProvider(Command):
    pass


class PrintLabel(Command):
    text: str = "label"


@pytest.fixture(autouse=True)
def _prints_labels(own_registry: None) -> None:
    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


def notes() -> list[str]:
    return sorted(Note.objects.values_list("text", flat=True))


@pytest.mark.parametrize("atomic", [True, False])
def test_a_transaction_is_open_while_a_handler_runs_only_if_it_is_atomic(atomic: bool) -> None:
    seen = []

    @handles(CallProvider, atomic=atomic)
    def call(message: CallProvider, context: HandlerContext) -> None:
        seen.append(connection.in_atomic_block)

    send(CallProvider())
    deliver_due()

    assert seen == [atomic]


def test_what_it_sends_is_stored_together_with_the_finish() -> None:
    stored = []

    @handles(CallProvider, atomic=False)
    def call(message: CallProvider, context: HandlerContext) -> None:
        context.send(PrintLabel())
        send(PrintLabel(text="by the module"))
        stored.append(statuses_of(PrintLabel))

    send(CallProvider())
    deliver_due()

    assert stored == [[]]
    assert notes() == ["by the module", "label"]
    assert delivery_of(CallProvider).status == Status.HANDLED


@override_settings(DJANGO_WORKFLOWS={"BACKOFF": timedelta(0)})
def test_it_is_at_least_once_and_what_a_failed_attempt_sent_does_not_leave() -> None:
    ids = []

    @handles(CallProvider, atomic=False)
    def call(message: CallProvider, context: HandlerContext) -> None:
        ids.append(context.delivery_id)
        Note.objects.create(text=f"called {context.attempt}")
        context.send(PrintLabel(text=f"sent {context.attempt}"))
        if context.attempt < 3:
            raise ValueError("the provider does not answer")

    send(CallProvider())
    deliver_due()

    assert notes() == ["called 1", "called 2", "called 3", "sent 3"]
    assert ids == [delivery_of(CallProvider).pk] * 3  # the idempotency key
    assert delivery_of(CallProvider).attempts == 2


def test_what_it_sent_inside_a_block_that_was_rolled_back_does_not_leave() -> None:
    @handles(CallProvider, atomic=False)
    def call(message: CallProvider, context: HandlerContext) -> None:
        context.send(PrintLabel(text="before"))
        with suppress(ValueError), transaction.atomic():
            context.send(PrintLabel(text="inside, rolled back"))
            raise ValueError
        with transaction.atomic():
            context.send(PrintLabel(text="inside, committed"))
        with transaction.atomic():
            context.send(PrintLabel(text="inside, marked"))
            transaction.set_rollback(True)

    send(CallProvider())
    deliver_due()

    assert notes() == ["before", "inside, committed"]


def test_what_it_sent_inside_a_savepoint_that_was_rolled_back_does_not_leave() -> None:
    @handles(CallProvider, atomic=False)
    def call(message: CallProvider, context: HandlerContext) -> None:
        with transaction.atomic():
            context.send(PrintLabel(text="outer"))
            with suppress(ValueError), transaction.atomic():
                context.send(PrintLabel(text="inner"))
                raise ValueError

    send(CallProvider())
    deliver_due()

    assert notes() == ["outer"]


def test_one_that_lost_its_lease_sends_nothing() -> None:
    """Its own writes are there, as its contract says; what it sends comes from the other worker."""
    runs = []

    @handles(CallProvider, atomic=False)
    def call(message: CallProvider, context: HandlerContext) -> None:
        runs.append(context.delivery_id)
        context.send(PrintLabel())
        if len(runs) == 1:  # its lease runs out, and the delivery is given to another worker
            Delivery.objects.filter(pk=context.delivery_id).update(status=Status.PENDING)
            deliver(context.delivery_id)

    send(CallProvider())
    ending = deliver(delivery_of(CallProvider).pk)
    deliver_due()

    assert isinstance(ending, Lost)
    assert len(runs) == 2
    assert (statuses_of(CallProvider), notes()) == ([Status.HANDLED], ["label"])


@pytest.mark.postgres
def test_a_conflict_of_the_finish_does_not_run_it_again() -> None:
    """Only the storing is tried again, since the provider has been called."""
    runs, locked = [], threading.Event()

    def lock_the_row_beyond_a_timeout() -> None:
        with transaction.atomic():
            list(Delivery.objects.select_for_update())
            locked.set()
            wait_until(somebody_waits_for_a_lock)
            time.sleep(0.3)  # longer than its lock_timeout
        connection.close()

    @handles(CallProvider, atomic=False)
    def call(message: CallProvider, context: HandlerContext) -> None:
        runs.append(context.attempt)
        context.send(PrintLabel())
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '250ms'")
        threading.Thread(target=lock_the_row_beyond_a_timeout).start()
        locked.wait(10)

    send(CallProvider())
    ending = deliver(delivery_of(CallProvider).pk)
    connection.close()  # and its lock_timeout with it
    deliver_due()

    delivery = delivery_of(CallProvider)
    assert isinstance(ending, Handled)
    assert (runs, notes(), delivery.attempts) == ([1], ["label"], 0)
    assert delivery.conflicts > 0


def somebody_waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
        return bool(cursor.fetchone()[0])
