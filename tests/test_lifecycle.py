"""Not found, completed, discarded: what a message meets that has no running instance."""

import logging
from datetime import timedelta
from typing import Any

import pytest

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
    started_by,
    when,
)
from django_workflows.dispatch import deliver
from django_workflows.models import Delivery, Lifecycle, Status
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Step = WorkflowContext[ParcelState]


class ParcelPosted(Event):
    number: int = 1


class ParcelScanned(Event):
    number: int = 1


class ParcelDelivered(Event):
    number: int = 1


class PrintLabel(Command):
    number: int = 1


class LabelPrinted(Event):
    number: int = 1


class Parcels:
    """A workflow that is declared in the registry of the test."""

    def __init__(self, if_missing: Any = "ignore") -> None:
        workflow = define_workflow(ParcelState)

        @workflow.started_by(ParcelPosted)
        def post(message: ParcelPosted, state: ParcelState, context: Step) -> None:
            state.number = message.number
            context.send(PrintLabel())

        @workflow.when(ParcelScanned, lookup="number", if_missing=if_missing)
        def scan(message: ParcelScanned, state: ParcelState, context: Step) -> None:
            state.seen.append("scanned")

        @workflow.when(LabelPrinted)
        def label(message: LabelPrinted, state: ParcelState, context: Step) -> None:
            state.seen.append("labelled")

        @workflow.when(ParcelDelivered, lookup="number")
        def end(message: ParcelDelivered, state: ParcelState, context: Step) -> None:
            state.seen.append("delivered")
            context.complete()

        @handles(PrintLabel)
        def print_label(message: PrintLabel, context: HandlerContext) -> None:
            Note.objects.create(text="label")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_message_without_an_instance_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D31, the default."""
    Parcels()

    publish(ParcelScanned(number=5))
    deliver_due()

    delivery = delivery_of(ParcelScanned)
    assert (delivery.status, delivery.attempts) == (Status.IGNORED, 0)
    assert delivery.reason == (
        "No instance of tests.ParcelState matches tests.ParcelScanned by number 5."
    )
    assert any("number 5" in warning for warning in warnings_in(caplog))


def test_a_message_that_waits_for_its_instance_finds_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D31, `if_missing="retry"`."""
    Parcels(if_missing="retry")

    publish(ParcelScanned())
    deliver_due()
    before = delivery_of(ParcelScanned)
    publish(ParcelPosted())
    deliver_due()
    move_clock_on(monkeypatch, timedelta(minutes=1))
    deliver_due()

    assert (before.status, before.attempts) == (Status.PENDING, 1)
    assert delivery_of(ParcelScanned).status == Status.HANDLED
    assert ParcelState.objects.get().seen == ["scanned"]


def test_a_message_that_must_have_an_instance_fails_at_once_and_can_be_replayed() -> None:
    """D31, `if_missing="fail"`."""
    Parcels(if_missing="fail")

    publish(ParcelScanned())
    deliver_due()
    failed = delivery_of(ParcelScanned)
    publish(ParcelPosted())
    deliver_due()
    Delivery.objects.filter(pk=failed.pk).replay()
    deliver_due()

    assert (failed.status, failed.attempts) == (Status.FAILED, 1)
    assert "No instance of tests.ParcelState matches" in failed.error
    assert delivery_of(ParcelScanned).status == Status.HANDLED


def test_after_completion_a_message_found_by_a_field_is_ignored_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D32, by lookup."""
    Parcels(if_missing="fail")
    for message in (ParcelPosted(), ParcelDelivered()):
        publish(message)
        deliver_due()

    publish(ParcelScanned())
    deliver_due()

    state = ParcelState.objects.get()
    delivery = delivery_of(ParcelScanned)
    assert state.seen == ["delivered"]
    assert (delivery.status, delivery.instance_id) == (Status.IGNORED, state.pk)
    assert delivery.reason == f"tests.ParcelState {state.pk} has ended."
    assert warnings_in(caplog) == []


def test_after_completion_a_message_found_by_the_id_is_ignored_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D32, by the workflow id that travels."""

    class EndAtOnce(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.send(PrintLabel())
            self.complete()

        @when(LabelPrinted)
        def label(self, message: LabelPrinted) -> None:
            self.state.seen.append("labelled")

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        context.publish(LabelPrinted())

    publish(ParcelPosted())
    deliver_due()

    assert ParcelState.objects.get().seen == []
    assert statuses_of(LabelPrinted) == [Status.IGNORED]
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("lifecycle", ["completed", "compensated", "cancelled"])
def test_an_instance_that_has_ended_handles_nothing(lifecycle: str) -> None:
    """D32, however it ended."""
    Parcels()
    ended_at = ParcelState().started_at
    ParcelState.objects.create(number=1, lifecycle=lifecycle, ended_at=ended_at)

    publish(ParcelScanned())
    deliver_due()

    assert ParcelState.objects.get().seen == []
    assert statuses_of(ParcelScanned) == [Status.IGNORED]


@pytest.mark.parametrize("lifecycle", ["running", "compensating", "failed"])
def test_an_instance_that_has_not_ended_handles_messages(lifecycle: str) -> None:
    """D32's other side."""
    Parcels()
    ParcelState.objects.create(number=1, lifecycle=lifecycle)

    publish(ParcelScanned())
    deliver_due()

    assert ParcelState.objects.get().seen == ["scanned"]


def test_a_step_may_start_and_complete_an_instance() -> None:
    """D33."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Step) -> None:
        state.number = message.number
        context.complete()

    publish(ParcelPosted(number=7))
    deliver_due()

    state = ParcelState.objects.get()
    assert (state.lifecycle, state.number, state.version) == (Lifecycle.COMPLETED, 7, 1)
    assert state.ended_at is not None
    assert not Delivery.objects.exclude(status=Status.HANDLED).exists()


def test_discard_in_a_start_step_leaves_no_instance_and_its_messages_leave() -> None:
    """D34, a step that starts."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Step) -> None:
        context.send(PrintLabel())
        context.discard()

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="label")

    publish(ParcelPosted())
    deliver_due()

    assert not ParcelState.objects.exists()
    assert Note.objects.count() == 1
    delivery = delivery_of(ParcelPosted)
    assert (delivery.status, delivery.instance_id) == (Status.HANDLED, None)
    assert delivery.reason == "The step discarded its changes."


def test_discard_in_a_when_step_saves_nothing_of_the_state() -> None:
    """D34, a step that continues."""
    workflow = define_workflow(ParcelState)

    @workflow.when(ParcelScanned, lookup="number")
    def scan(message: ParcelScanned, state: ParcelState, context: Step) -> None:
        state.seen.append("scanned")
        state.customer = "changed"
        context.send(PrintLabel())
        context.discard()

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="label")

    before = ParcelState.objects.create(number=1)
    publish(ParcelScanned())
    deliver_due()

    after = ParcelState.objects.get()
    assert (after.version, after.seen, after.customer) == (before.version, [], "")
    assert Note.objects.count() == 1
    assert delivery_of(ParcelScanned).changes is None


def test_a_start_message_that_is_delivered_again_after_completion_starts_nothing() -> None:
    """D35: the broker's copy meets the row; a replay leaves what was handled alone."""
    Parcels()
    for message in (ParcelPosted(), ParcelDelivered()):
        publish(message)
        deliver_due()
    delivery = delivery_of(ParcelPosted)

    again = deliver(delivery.pk)
    replayed = Delivery.objects.filter(pk=delivery.pk).replay()
    deliver_due()

    assert (again, replayed) == (None, 0)
    assert ParcelState.objects.count() == 1
    assert Note.objects.count() == 1
