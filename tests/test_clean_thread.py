"""What an exception leaves behind on its thread: nothing. And what the row says of it."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from django_workflows import (
    Command,
    HandlerContext,
    WorkflowContext,
    context,
    define_workflow,
    handles,
    send,
)
from django_workflows.dispatch import deliver
from django_workflows.endings import Handled
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of, move_clock_on
from tests.models import Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Step = WorkflowContext[ParcelState]


class PrintLabel(Command):
    pass


class FoldLabel(Command):
    pass


def breaks_the_transaction() -> None:
    """A database error that nobody caught a savepoint for."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT no_such_column FROM tests_note")


def raises_in_an_inner_block() -> None:
    with transaction.atomic():
        Note.objects.create(text="inner")
        raise ValueError("inside")


def marks_for_rollback() -> None:
    transaction.set_rollback(True)
    raise ValueError("marked")


def exits() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "fail", [breaks_the_transaction, raises_in_an_inner_block, marks_for_rollback, exits]
)
@pytest.mark.parametrize("atomic", [True, False])
def test_after_an_exception_the_thread_is_clean_and_the_next_delivery_is_handled(
    fail: Any, atomic: bool
) -> None:
    """H58."""

    @handles(PrintLabel, atomic=atomic)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        send(FoldLabel())
        if atomic or fail is not marks_for_rollback:
            fail()
        raise ValueError("it needs a transaction")

    @handles(FoldLabel)
    def fold_label(message: FoldLabel, context: HandlerContext) -> None:
        Note.objects.create(text="folded")

    send(PrintLabel())
    deliver(delivery_of(PrintLabel).pk)

    assert delivery_of(PrintLabel).attempts == 1
    assert context._current.get() is None
    assert connection.in_atomic_block is False
    assert connection.get_autocommit() is True
    assert connection.run_on_commit == []
    send(FoldLabel())  # from no context: it leaves at once, and inherits nothing
    fold = delivery_of(FoldLabel)
    assert (fold.causation_id, fold.sender) == (None, "")
    assert isinstance(deliver(fold.pk), Handled)
    assert Note.objects.get().text == "folded"


@pytest.mark.parametrize("text", ["a NUL \x00 in it", "a surrogate \udcff in it", "\x00", "\ud800"])
def test_an_error_text_that_the_database_refuses_is_recorded_all_the_same(text: str) -> None:
    """H58."""

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        raise ValueError(text)

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 1)
    assert delivery.error.startswith("ValueError: ")
    assert "\x00" not in delivery.error + delivery.traceback
    assert "print_label" in delivery.traceback
    assert delivery.failures[0]["error"] == delivery.error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Unspeakable(), ValueError("x" * 5_000_000)])
def test_an_error_without_end_or_without_words_is_recorded_all_the_same(error: Exception) -> None:
    """H58, further."""

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        raise error

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 1)
    assert type(error).__name__ in delivery.error
    assert len(delivery.error) + len(delivery.traceback) < 30_000


def test_a_database_error_caught_without_a_savepoint_is_a_failure_that_says_so() -> None:
    """Django would roll back without an exception, and the step would seem to be handled."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(PrintLabel)
    def start(message: PrintLabel, state: ParcelState, context: Step) -> None:
        with suppress(DatabaseError), transaction.atomic(savepoint=False):
            Note.objects.create(text="first")
            raise IntegrityError("as if the database had refused it")

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 1)
    assert "caught inside the transaction without a savepoint" in delivery.error
    assert (ParcelState.objects.count(), Note.objects.count()) == (0, 0)


@pytest.mark.postgres
def test_an_aborted_transaction_is_a_failure_that_says_so() -> None:
    """Postgres refuses everything after an error that was caught without a savepoint."""

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        with suppress(DatabaseError):
            breaks_the_transaction()

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 1)
    assert "transaction is aborted" in delivery.error


def test_a_database_error_caught_with_a_savepoint_is_the_handlers_own_business() -> None:
    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        try:
            with transaction.atomic():
                breaks_the_transaction()
        except DatabaseError:
            Note.objects.create(text="caught")

    send(PrintLabel())
    deliver_due()

    assert Note.objects.get().text == "caught"
    assert delivery_of(PrintLabel).status == Status.HANDLED


def test_what_a_callback_raises_after_the_commit_leaves_the_delivery_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row is read, never guessed from the exception: nothing is done twice."""

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="label")
        context.send(FoldLabel())
        transaction.on_commit(exits)

    @handles(FoldLabel)
    def fold_label(message: FoldLabel, context: HandlerContext) -> None:
        Note.objects.create(text="folded")

    send(PrintLabel())
    ending = deliver(delivery_of(PrintLabel).pk)
    move_clock_on(monkeypatch, timedelta(hours=2))
    deliver_due()

    assert isinstance(ending, Handled)
    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts, delivery.claims) == (Status.HANDLED, 0, 1)
    assert delivery.error == ""
    assert sorted(Note.objects.values_list("text", flat=True)) == ["folded", "label"]


def test_a_delivery_whose_row_is_gone_is_left_alone() -> None:
    """Retention, or a person, may delete it while it runs."""

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="label")
        Delivery.objects.all().delete()

    send(PrintLabel())
    deliver(delivery_of(PrintLabel).pk)

    assert not Note.objects.exists()
