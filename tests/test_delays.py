"""`delay=` and `at=`: a message that waits does so in the table."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

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
from django_workflows.errors import MessageError
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Step = WorkflowContext[ParcelState]


class ParcelPosted(Event):
    number: int = 1


class PrintLabel(Command):
    pass


def prints_labels() -> None:
    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="label")


@pytest.mark.parametrize("how", ["delay", "at"])
def test_a_delayed_message_waits_until_it_is_due(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E37: neither the relay nor a wake-up that comes too early gets it."""
    prints_labels()
    if how == "delay":
        send(PrintLabel(), delay=timedelta(hours=1))
    else:
        send(PrintLabel(), at=timezone.now() + timedelta(hours=1))

    deliver_due()
    too_early = deliver(delivery_of(PrintLabel).pk)
    waiting = delivery_of(PrintLabel)
    move_clock_on(monkeypatch, timedelta(minutes=59))
    deliver_due()
    notes_before = Note.objects.count()
    move_clock_on(monkeypatch, timedelta(minutes=2))
    deliver_due()

    assert too_early is None
    assert (waiting.status, waiting.claims, waiting.relay_at) == (
        Status.PENDING,
        0,
        waiting.due_at,
    )
    assert timedelta(minutes=59) < waiting.due_at - waiting.created_at <= timedelta(hours=1)
    assert (notes_before, Note.objects.count()) == (0, 1)


@pytest.mark.parametrize(
    "terms",
    [
        {"delay": timedelta(seconds=-5)},
        {"delay": timedelta(0)},
        {"at": datetime(2001, 1, 1, tzinfo=UTC)},
    ],
)
def test_a_time_that_has_passed_means_now(terms: Any) -> None:
    prints_labels()

    send(PrintLabel(), **terms)
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert delivery.status == Status.HANDLED
    assert delivery.due_at == delivery.created_at


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"delay": timedelta(1), "at": datetime(2030, 1, 1, tzinfo=UTC)}, "Both delay= and at="),
        ({"delay": 5}, "not a timedelta"),
        ({"at": datetime(2030, 1, 1)}, "not an aware datetime"),
        ({"at": "tomorrow"}, "not an aware datetime"),
    ],
)
def test_a_time_that_makes_no_sense_is_an_error_for_the_sender(terms: Any, problem: str) -> None:
    prints_labels()

    with pytest.raises(MessageError, match=problem):
        send(PrintLabel(), **terms)

    assert not Delivery.objects.exists()


def test_an_event_may_be_delayed_for_all_of_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Step) -> None: ...

    @handles(ParcelPosted)
    def note(message: ParcelPosted, context: HandlerContext) -> None: ...

    publish(ParcelPosted(), delay=timedelta(hours=1))
    deliver_due()
    before = statuses_of(ParcelPosted)
    move_clock_on(monkeypatch, timedelta(hours=2))
    deliver_due()

    assert before == [Status.PENDING] * 2
    assert statuses_of(ParcelPosted) == [Status.HANDLED] * 2
