"""A handler or step that raises: retried, failed, replayed, and never in the way of the next."""

import itertools
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
    send,
)
from django_workflows.dispatch import deliver
from django_workflows.errors import StaleState, Unrecoverable
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Step = WorkflowContext[ParcelState]


class ParcelPosted(Event):
    number: int = 1


class PrintLabel(Command):
    text: str = "label"


class FlakyPrinter:
    """A handler of `PrintLabel` that raises `error` the first `times`; it counts its runs."""

    def __init__(self, times: float, error: BaseException | None = None, **options: Any) -> None:
        self.runs = 0

        @handles(PrintLabel, name="tests.print_label", **options)
        def print_label(message: PrintLabel, context: HandlerContext) -> None:
            self.runs += 1
            Note.objects.create(text=message.text)
            if self.runs <= times:
                raise error or ValueError(f"out of ink, attempt {context.attempt}")


def wait_of(delivery: Delivery) -> timedelta:
    """From the moment it was claimed to its next attempt."""
    assert delivery.started_at is not None
    return delivery.due_at - delivery.started_at


def test_the_third_attempt_succeeds_and_the_failed_ones_left_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H51."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Step) -> None:
        context.send(PrintLabel())
        Note.objects.create(text=f"attempt {context.attempt}")
        if context.attempt < 3:
            raise ValueError("not now")

    FlakyPrinter(times=0)
    publish(ParcelPosted())
    left = []
    for _ in range(3):
        deliver_due()
        left.append((ParcelState.objects.count(), Note.objects.count()))
        move_clock_on(monkeypatch, timedelta(minutes=1))

    assert left == [(0, 0), (0, 0), (1, 2)]
    assert sorted(Note.objects.values_list("text", flat=True)) == ["attempt 3", "label"]
    delivery = delivery_of(ParcelPosted)
    assert (delivery.status, delivery.attempts, delivery.claims) == (Status.HANDLED, 2, 3)
    assert statuses_of(PrintLabel) == [Status.HANDLED]


def test_each_wait_is_longer_than_the_last_and_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H51, growing: 1 s, 4 s, 16 s, ... at most an hour, each less up to a half."""
    FlakyPrinter(times=99)
    send(PrintLabel())

    waits = []
    for _ in range(9):
        deliver_due()
        waits.append(wait_of(delivery_of(PrintLabel)).total_seconds())
        move_clock_on(monkeypatch, timedelta(hours=2))

    for wait, full in zip(waits, [1, 4, 16, 64, 256, 1024, 3600, 3600, 3600], strict=True):
        assert full / 2 <= wait <= full + 1


def test_deliveries_that_failed_together_are_not_retried_together() -> None:
    """H51, jittered."""
    FlakyPrinter(times=99)
    send(*(PrintLabel(text=str(number)) for number in range(8)))

    with override_settings(DJANGO_WORKFLOWS={"BACKOFF": timedelta(hours=1)}):
        deliver_due()

    waits = sorted(map(wait_of, Delivery.objects.all()))
    assert waits[-1] - waits[0] > timedelta(minutes=1)


def test_a_retry_is_not_taken_before_it_is_due() -> None:
    """H51: neither by the relay nor by a late duplicate of the first wake-up."""
    printer = FlakyPrinter(times=1)
    send(PrintLabel())
    deliver_due()

    deliver_due()
    duplicate = deliver(delivery_of(PrintLabel).pk)

    assert duplicate is None
    assert printer.runs == 1


@override_settings(DJANGO_WORKFLOWS={"ATTEMPTS": 3, "BACKOFF": timedelta(0)})
def test_out_of_attempts_it_is_failed_and_says_what_happened() -> None:
    """H52."""
    printer = FlakyPrinter(times=99)

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts, printer.runs) == (Status.FAILED, 3, 3)
    assert delivery.error == "ValueError: out of ink, attempt 3"
    assert "in print_label" in delivery.traceback
    assert [(f["attempt"], f["error"]) for f in delivery.failures] == [
        (n, f"ValueError: out of ink, attempt {n}") for n in (1, 2, 3)
    ]
    assert delivery.ended_at is not None


@override_settings(DJANGO_WORKFLOWS={"ATTEMPTS": 3, "BACKOFF": timedelta(0)})
def test_a_replay_starts_a_fresh_count_and_is_handled_normally() -> None:
    """H52, the replay: two more failures do not use up the three attempts."""
    printer = FlakyPrinter(times=5)
    send(PrintLabel())
    deliver_due()

    replayed = Delivery.objects.filter(status=Status.FAILED).replay()
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert replayed == 1
    assert (delivery.status, delivery.attempts, printer.runs) == (Status.HANDLED, 2, 6)
    assert len(delivery.failures) == 5
    assert Note.objects.count() == 1


class OutOfPaper(Unrecoverable):
    pass


@pytest.mark.parametrize(
    ("error", "declared"),
    [(OutOfPaper("no paper"), ()), (ZeroDivisionError("by zero"), (ArithmeticError,))],
)
def test_an_unrecoverable_error_skips_the_retries(error: Exception, declared: Any) -> None:
    """H53: one that is `Unrecoverable`, and one that the handler declares to be."""
    printer = FlakyPrinter(times=99, error=error, unrecoverable=declared)

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts, printer.runs) == (Status.FAILED, 1, 1)
    assert delivery.error.endswith(f"{type(error).__name__}: {error}")


def test_a_step_declares_its_own_unrecoverable_errors() -> None:
    """H53, in a workflow: the declaration of one step does not count for another's message."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted, unrecoverable=[ValueError])
    def post(message: ParcelPosted, state: ParcelState, context: Step) -> None:
        raise ValueError("never")

    @workflow.started_by(PrintLabel)
    def label(message: PrintLabel, state: ParcelState, context: Step) -> None:
        raise ValueError("later")

    publish(ParcelPosted())
    send(PrintLabel())
    deliver_due()

    assert (statuses_of(ParcelPosted), statuses_of(PrintLabel)) == (["failed"], ["pending"])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_even_an_exit_in_a_handler_is_a_failure_of_the_handler(
    kind: type[BaseException],
) -> None:
    """H51, `BaseException` included: `deliver` never raises."""
    FlakyPrinter(times=1, error=kind())

    send(PrintLabel())
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 1)
    assert delivery.error.startswith(kind.__name__)


def stale_save() -> None:
    """Saves a state that somebody else has saved meanwhile, as a step of a user may."""
    state = ParcelState.objects.create()
    ParcelState.objects.filter(pk=state.pk).update(number=1)
    state.save()


def test_conflicts_do_not_use_up_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """H57: neither those retried in place nor those after which it was released for a moment."""
    runs = itertools.count(1)

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        if next(runs) <= 7:
            stale_save()
        Note.objects.create(text=message.text)

    send(PrintLabel())
    deliver_due()
    released = delivery_of(PrintLabel)
    move_clock_on(monkeypatch, timedelta(seconds=1))
    deliver_due()

    assert (released.status, released.attempts, released.conflicts) == (Status.PENDING, 0, 5)
    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts, delivery.conflicts) == (Status.HANDLED, 0, 7)
    assert (delivery.error, Note.objects.count()) == ("", 1)


def test_a_minute_of_nothing_but_conflicts_counts_as_one_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H57's limit."""

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        stale_save()

    send(PrintLabel())
    attempts = []
    for _ in range(3):
        deliver_due()
        attempts.append(delivery_of(PrintLabel).attempts)
        move_clock_on(monkeypatch, timedelta(seconds=61))

    assert attempts == [0, 1, 1]
    assert StaleState.__name__ in delivery_of(PrintLabel).error
