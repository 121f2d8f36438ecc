"""`reply` goes to the one instance that asked."""

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
    send,
    started_by,
    when,
)
from django_workflows.models import Status
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import InvoiceState, Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class ParcelPosted(Event):
    number: int = 1


class WeighParcel(Command):
    number: int


class ParcelWeighed(Event):
    number: int


class CheckInvoice(Command):
    number: int


class InvoiceChecked(Event):
    number: int


def weighs_parcels() -> None:
    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def weigh(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(WeighParcel(number=message.number))

        @when(ParcelWeighed)
        def note(self, message: ParcelWeighed) -> None:
            self.state.seen.append(message.number)

    @handles(ParcelWeighed)
    def everybody_else(message: ParcelWeighed, context: HandlerContext) -> None:
        Note.objects.create(text="weighed")


def test_a_reply_reaches_the_instance_that_asked_and_nobody_else() -> None:
    """F43: not even those who subscribe to the event."""
    weighs_parcels()

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        context.reply(ParcelWeighed(number=message.number))

    publish(*(ParcelPosted(number=number) for number in (1, 2, 3)))
    deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {1: [1], 2: [2], 3: [3]}
    assert not Note.objects.exists()


def test_a_reply_reaches_the_asker_by_its_id_whatever_lookup_its_step_has() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def weigh(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        context.send(WeighParcel(number=message.number))

    @workflow.when(ParcelWeighed, lookup="number")
    def note(message: ParcelWeighed, state: ParcelState, context: Any) -> None:
        state.seen.append(message.number)

    @handles(WeighParcel)
    def reply(message: WeighParcel, context: HandlerContext) -> None:
        context.reply(ParcelWeighed(number=99))

    other = ParcelState.objects.create(number=99)
    publish(ParcelPosted(number=1))
    deliver_due()

    assert ParcelState.objects.exclude(pk=other.pk).get().seen == [99]
    other.refresh_from_db()
    assert other.seen == []


def test_a_child_replies_to_its_parent_from_a_later_step() -> None:
    """F43, F45: from a step whose message no workflow sent, to who started this instance."""
    weighs_parcels()

    class Scales(Workflow[InvoiceState]):
        @started_by(WeighParcel)
        def begin(self, message: WeighParcel) -> None:
            self.state.seen.append(message.number)

        @when(CheckInvoice, lookup=lambda message: child.pk, maps_to="id")
        def finish(self, message: CheckInvoice) -> None:
            self.reply(ParcelWeighed(number=message.number))
            self.complete()

    publish(ParcelPosted(number=1), ParcelPosted(number=2))
    deliver_due()
    child = InvoiceState.objects.get(starter_id=ParcelState.objects.get(number=2).pk)
    send(CheckInvoice(number=7))
    deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {1: [], 2: [7]}


def test_a_step_replies_to_the_workflow_that_sent_the_message_being_handled() -> None:
    """F43: the asker of this message wins over who started the instance."""
    workflow = define_workflow(InvoiceState)
    weighs_parcels()

    @workflow.when(WeighParcel, lookup=lambda message: invoice.pk, maps_to="id")
    def weigh(message: WeighParcel, state: InvoiceState, context: WorkflowContext[Any]) -> None:
        context.reply(ParcelWeighed(number=message.number))

    first = ParcelState.objects.create(number=50)
    invoice = InvoiceState.objects.create(starter_workflow="tests.ParcelState", starter_id=first.pk)
    publish(ParcelPosted(number=1))
    deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {50: [], 1: [1]}


def test_a_reply_where_nobody_asked_is_an_error_that_says_so() -> None:
    """F44."""

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        context.reply(ParcelWeighed(number=1))

    send(WeighParcel(number=1))
    deliver_due()

    delivery = delivery_of(WeighParcel)
    assert delivery.status == Status.PENDING
    assert delivery.error == (
        "django_workflows.errors.NobodyAsked: tests.WeighParcel was not sent by a workflow, so "
        "there is nobody to reply to. Publish an event instead."
    )


def test_a_reply_of_an_instance_that_nobody_started_is_an_error_that_says_so() -> None:
    """F44, in a step."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: WorkflowContext[Any]) -> None:
        context.reply(ParcelWeighed(number=1))

    publish(ParcelPosted())
    deliver_due()

    assert "NobodyAsked: No workflow sent tests.ParcelPosted" in delivery_of(ParcelPosted).error
    assert not ParcelState.objects.exists()


def test_a_reply_for_which_the_asker_has_no_step_is_an_error_that_names_both() -> None:
    weighs_parcels()

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        context.reply(InvoiceChecked(number=1))

    publish(ParcelPosted())
    deliver_due()

    assert "tests.ParcelState asked, but has no step @when(InvoiceChecked)" in (
        delivery_of(WeighParcel).error
    )


def test_a_reply_to_an_asker_that_has_ended_is_ignored() -> None:
    weighs_parcels()

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        ParcelState.objects.update(lifecycle="completed", ended_at=ParcelState().started_at)
        context.reply(ParcelWeighed(number=1))

    publish(ParcelPosted())
    deliver_due()

    assert statuses_of(ParcelWeighed) == [Status.IGNORED]
    assert ParcelState.objects.get().seen == []
