"""One message for several: instances, workflows, handlers, a parent and its child."""

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
from django_workflows.models import Status
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import InvoiceState, Note, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class OrderPlaced(Event):
    number: int


class SendInvoice(Command):
    number: int


class PrintInvoice(Command):
    number: int


class InvoicePrinted(Event):
    number: int


class StrikeCalled(Event):
    number: int = 1


def test_a_workflow_started_by_another_does_not_lose_its_parent() -> None:
    """C21."""

    class Parcels(Workflow[ParcelState]):
        @started_by(OrderPlaced)
        def bill(self, message: OrderPlaced) -> None:
            self.state.number = message.number
            self.send(SendInvoice(number=message.number))

        @when(InvoicePrinted)
        def note(self, message: InvoicePrinted) -> None:
            self.state.seen.append(message.number)

    class Invoices(Workflow[InvoiceState]):
        @started_by(SendInvoice)
        def print_it(self, message: SendInvoice) -> None:
            self.send(PrintInvoice(number=message.number))

        @when(InvoicePrinted)
        def note(self, message: InvoicePrinted) -> None:
            self.state.seen.append(message.number)

    @handles(PrintInvoice)
    def print_invoice(message: PrintInvoice, context: HandlerContext) -> None:
        context.publish(InvoicePrinted(number=message.number))

    publish(OrderPlaced(number=1), OrderPlaced(number=2))
    deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {1: [1], 2: [2]}
    children = {
        child.seen[0]: (child.starter_workflow, child.starter_id)
        for child in InvoiceState.objects.all()
    }
    parents = {parent.number: parent.pk for parent in ParcelState.objects.all()}
    assert children == {n: ("tests.ParcelState", parents[n]) for n in (1, 2)}


def test_what_a_child_sends_carries_the_ids_of_itself_and_its_parent() -> None:
    """C21, the map that travels."""
    parcels, invoices = define_workflow(ParcelState), define_workflow(InvoiceState)

    @parcels.started_by(OrderPlaced)
    def bill(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        context.send(SendInvoice(number=message.number))

    @invoices.started_by(SendInvoice)
    def print_it(message: SendInvoice, state: InvoiceState, context: WorkflowContext[Any]) -> None:
        context.send(PrintInvoice(number=message.number))

    @handles(PrintInvoice)
    def print_invoice(message: PrintInvoice, context: HandlerContext) -> None: ...

    publish(OrderPlaced(number=1))
    deliver_due()

    parent, child = ParcelState.objects.get(), InvoiceState.objects.get()
    assert delivery_of(SendInvoice).workflow_ids == {"tests.ParcelState": str(parent.pk)}
    assert delivery_of(PrintInvoice).workflow_ids == {
        "tests.ParcelState": str(parent.pk),
        "tests.InvoiceState": str(child.pk),
    }


def test_of_three_matching_instances_only_the_one_that_failed_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C25."""
    workflow = define_workflow(ParcelState)

    @workflow.when(StrikeCalled, lookup="number")
    def note(message: StrikeCalled, state: ParcelState, context: WorkflowContext[Any]) -> None:
        if state.customer == "second" and context.attempt == 1:
            raise ValueError("not now")
        state.seen.append(context.attempt)

    for customer in ("first", "second", "third"):
        ParcelState.objects.create(number=1, customer=customer)
    publish(StrikeCalled())
    deliver_due()
    after_one_failure = dict(ParcelState.objects.values_list("customer", "seen"))
    move_clock_on(monkeypatch, timedelta(minutes=1))
    deliver_due()

    assert after_one_failure == {"first": [1], "second": [], "third": [1]}
    assert dict(ParcelState.objects.values_list("customer", "seen")) == {
        "first": [1],
        "second": [2],
        "third": [1],
    }
    assert statuses_of(StrikeCalled) == [Status.HANDLED] * 4
    assert dict(ParcelState.objects.values_list("customer", "version")) == {
        "first": 2,
        "second": 2,
        "third": 2,
    }


def test_a_message_starts_an_instance_or_continues_the_one_that_matches() -> None:
    """C28."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(OrderPlaced)
    def start(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        state.number = message.number
        state.seen.append("started")

    @workflow.when(OrderPlaced, lookup="number")
    def go_on(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        state.seen.append("continued")

    for number in (1, 2, 1):
        publish(OrderPlaced(number=number))
        deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {
        1: ["started", "continued"],
        2: ["started"],
    }


def test_start_or_continue_starts_anew_once_the_instance_has_ended() -> None:
    """C28, where no unique constraint forbids it."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(OrderPlaced)
    def start(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        state.number = message.number

    @workflow.when(OrderPlaced, lookup="number")
    def end(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        context.complete()

    for _ in range(3):
        publish(OrderPlaced(number=1))
        deliver_due()

    lifecycles = ParcelState.objects.order_by("id").values_list("lifecycle", flat=True)
    assert list(lifecycles) == ["completed", "running"]


def test_of_two_workflows_on_one_event_the_failure_of_one_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C29."""
    parcels, invoices = define_workflow(ParcelState), define_workflow(InvoiceState)

    @parcels.started_by(OrderPlaced)
    def fail_once(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        if context.attempt == 1:
            raise ValueError("not now")

    @invoices.started_by(OrderPlaced)
    def start(message: OrderPlaced, state: InvoiceState, context: WorkflowContext[Any]) -> None: ...

    publish(OrderPlaced(number=1))
    deliver_due()
    after_one_failure = (ParcelState.objects.count(), InvoiceState.objects.count())
    move_clock_on(monkeypatch, timedelta(minutes=1))
    deliver_due()

    assert after_one_failure == (0, 1)
    assert (ParcelState.objects.count(), InvoiceState.objects.count()) == (1, 1)
    assert delivery_of(OrderPlaced, handler="tests.ParcelState").attempts == 1
    assert delivery_of(OrderPlaced, handler="tests.InvoiceState").attempts == 0


@pytest.mark.parametrize("failing", ["handler", "workflow"])
def test_of_a_handler_and_a_workflow_on_one_event_the_failure_of_one_is_its_own(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30."""
    parcels = define_workflow(ParcelState)

    def fail_once(who: str, context: Any) -> None:
        if who == failing and context.attempt == 1:
            raise ValueError("not now")

    @parcels.started_by(OrderPlaced)
    def start(message: OrderPlaced, state: ParcelState, context: WorkflowContext[Any]) -> None:
        fail_once("workflow", context)

    @handles(OrderPlaced)
    def note(message: OrderPlaced, context: HandlerContext) -> None:
        Note.objects.create(text="placed")
        fail_once("handler", context)

    publish(OrderPlaced(number=1))
    deliver_due()
    after_one_failure = {"workflow": ParcelState.objects.count(), "handler": Note.objects.count()}
    move_clock_on(monkeypatch, timedelta(minutes=1))
    deliver_due()

    assert after_one_failure == {"workflow": 1, "handler": 1, failing: 0}
    assert (ParcelState.objects.count(), Note.objects.count()) == (1, 1)
    assert sum(d.attempts for d in map(_of, ("tests.ParcelState", "tests.note"))) == 1


def _of(handler: str) -> Any:
    return delivery_of(OrderPlaced, handler=handler)
