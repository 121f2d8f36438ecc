"""`cancel_instance`: an instance is ended from outside, whole or not at all."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.db import connection, transaction

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    WorkflowEnded,
    cancel_instance,
    define_workflow,
    handles,
    publish,
    started_by,
    when,
    when_all,
    when_completed,
)
from django_workflows.dispatch import claim, deliver, run, settle
from django_workflows.endings import Handled, Ignored
from django_workflows.errors import WorkflowsError
from django_workflows.models import Delivery, Status
from tests.concurrency import at_once, wait_until
from tests.delivering import delivery_of, statuses_of
from tests.models import InvoiceState, Note, ParcelState, SurveyState, TallyState

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("isolated_registry"),
]


class ParcelPosted(Event):
    number: int = 1


class ParcelScanned(Event):
    number: int = 1


class ParcelOverdue(Command):
    """A timeout."""


class PrintLabel(Command):
    pass


class TearLabel(Command):
    """The undo of the label."""


class SendInvoice(Command):
    pass


class Remind(Command):
    """The start of a grandchild."""


def parcels(in_step: Callable[[], object] = lambda: None) -> None:
    """Declares a workflow that waits for itself, for others, and has something to undo."""

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(ParcelOverdue(), delay=timedelta(hours=1))
            self.compensate_with(TearLabel())

        @when(ParcelScanned, lookup="number")
        def scan(self, message: ParcelScanned) -> None:
            in_step()
            self.state.seen.append("scanned")
            self.send(PrintLabel(), delay=timedelta(hours=1))

        @when(ParcelOverdue)
        def complain(self, message: ParcelOverdue) -> None:
            self.state.seen.append("overdue")

    @handles(PrintLabel, name="print")
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text="printed")

    @handles(TearLabel, name="tear")
    def tear(message: TearLabel, context: HandlerContext) -> None:
        Note.objects.create(text="torn")


def test_a_cancelled_instance_has_ended_and_what_it_waited_for_is_cancelled(
    workflows: ModuleType,
) -> None:
    """E39: what it has sent to itself. What it has sent to others is not taken back."""
    parcels()
    publish(ParcelPosted(number=1), ParcelPosted(number=2), ParcelScanned(number=1))
    workflows.run_until_idle()
    instance = ParcelState.objects.get(number=1)

    cancelled = cancel_instance(instance, reason="The customer changed his mind.")

    instance.refresh_from_db()
    assert cancelled
    assert (instance.lifecycle, instance.version, instance.is_live) == ("cancelled", 3, False)
    assert instance.ended_at is not None
    overdue = delivery_of(ParcelOverdue, instance_id=instance.pk)
    assert (overdue.status, overdue.reason) == (
        Status.CANCELLED,
        "The customer changed his mind.",
    )
    assert sorted(statuses_of(ParcelOverdue)) == [Status.CANCELLED, Status.PENDING]
    workflows.advance(timedelta(hours=2))
    assert statuses_of(PrintLabel) == [Status.HANDLED]
    assert dict(ParcelState.objects.values_list("number", "seen")) == {
        1: ["scanned"],
        2: ["overdue"],
    }


def test_what_it_has_noted_to_undo_is_cancelled_too(workflows: ModuleType) -> None:
    parcels()
    publish(ParcelPosted())
    workflows.run_until_idle()
    before = statuses_of(TearLabel)

    cancel_instance(ParcelState.objects.get())
    workflows.advance(timedelta(days=1))

    assert before == [Status.NOTED]
    assert statuses_of(TearLabel) == [Status.CANCELLED]
    assert not Note.objects.exists()


def test_a_message_for_a_cancelled_instance_is_ignored(workflows: ModuleType) -> None:
    """D32."""
    parcels()
    publish(ParcelPosted())
    workflows.run_until_idle()

    cancel_instance(ParcelState.objects.get())
    publish(ParcelScanned())
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.IGNORED]
    assert delivery_of(ParcelScanned).reason.endswith("has ended.")


def test_an_instance_that_has_ended_cannot_be_cancelled(workflows: ModuleType) -> None:
    parcels()
    publish(ParcelPosted())
    workflows.run_until_idle()
    instance = ParcelState.objects.get()
    first = cancel_instance(instance)
    ended_at = ParcelState.objects.get().ended_at

    second = cancel_instance(instance)

    assert (first, second) == (True, False)
    assert ParcelState.objects.get().ended_at == ended_at


def test_an_instance_whose_undoing_has_failed_can_be_cancelled(workflows: ModuleType) -> None:
    parcels()
    publish(ParcelPosted())
    workflows.run_until_idle()
    ParcelState.objects.update(lifecycle="failed")

    cancelled = cancel_instance(ParcelState.objects.get())

    assert cancelled
    assert ParcelState.objects.get().lifecycle == "cancelled"


def test_cancelling_is_undone_with_the_transaction_that_it_was_in(workflows: ModuleType) -> None:
    parcels()
    publish(ParcelPosted())
    workflows.run_until_idle()

    with transaction.atomic():
        cancel_instance(ParcelState.objects.get())
        transaction.set_rollback(True)
    workflows.advance(timedelta(hours=2))

    state = ParcelState.objects.get()
    assert (state.lifecycle, state.seen) == ("running", ["overdue"])


def test_a_state_on_which_no_workflow_is_declared_is_an_error_that_says_so() -> None:
    instance = SurveyState.objects.create()

    with pytest.raises(WorkflowsError, match="No workflow is declared on"):
        cancel_instance(instance)


def test_an_arrival_at_the_join_of_a_cancelled_instance_is_ignored(workflows: ModuleType) -> None:
    """F46 and D32."""
    ran = []

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number

        @when_all(ParcelScanned, count=2, lookup="number")
        def all_scanned(self, messages: list[ParcelScanned]) -> None:
            ran.append(messages)

    publish(ParcelPosted(), ParcelScanned())
    workflows.run_until_idle()

    cancel_instance(ParcelState.objects.get())
    publish(ParcelScanned())
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.HANDLED, Status.IGNORED]
    assert ran == []


# Children


def families(in_first_step: Callable[[], object] = lambda: None) -> list[str]:
    """Declares a parent, a child and a grandchild; the outcomes that the parent was told."""
    told: list[str] = []

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(SendInvoice())

        @when_completed(InvoiceState)
        def paid(self, ended: WorkflowEnded) -> None:
            told.append(ended.outcome)

    class Invoices(Workflow[InvoiceState]):
        @started_by(SendInvoice)
        def begin(self, message: SendInvoice) -> None:
            in_first_step()
            self.send(Remind())

    reminders = define_workflow(TallyState)

    @reminders.started_by(Remind)
    def begin(message: Remind, state: TallyState, context: Any) -> None:
        state.key = str(context.workflow_id)

    return told


def test_with_cascade_children_and_theirs_are_cancelled_too(workflows: ModuleType) -> None:
    families()
    publish(ParcelPosted(number=1), ParcelPosted(number=2))
    workflows.run_until_idle()
    parent = ParcelState.objects.get(number=1)
    child = InvoiceState.objects.get(starter_id=parent.pk)

    cancel_instance(parent, cascade=True)
    workflows.run_until_idle()

    assert InvoiceState.objects.get(pk=child.pk).lifecycle == "cancelled"
    assert TallyState.objects.get(starter_id=child.pk).lifecycle == "cancelled"
    for state in (ParcelState, InvoiceState, TallyState):  # the other family's
        assert sorted(state.objects.values_list("lifecycle", flat=True)) == ["cancelled", "running"]


def test_without_cascade_children_go_on(workflows: ModuleType) -> None:
    families()
    publish(ParcelPosted())
    workflows.run_until_idle()

    cancel_instance(ParcelState.objects.get())

    assert InvoiceState.objects.get().lifecycle == "running"
    assert TallyState.objects.get().lifecycle == "running"


def test_the_parent_of_a_cancelled_child_is_told(workflows: ModuleType) -> None:
    """F45."""
    told = families()
    publish(ParcelPosted())
    workflows.run_until_idle()

    cancel_instance(InvoiceState.objects.get(), cascade=True)
    workflows.run_until_idle()

    assert told == ["cancelled"]
    assert ParcelState.objects.get().lifecycle == "running"


def test_with_cascade_a_child_that_has_not_begun_never_does(workflows: ModuleType) -> None:
    families()
    publish(ParcelPosted())
    deliver(delivery_of(ParcelPosted).pk)

    cancel_instance(ParcelState.objects.get(), cascade=True)
    workflows.run_until_idle()

    assert statuses_of(SendInvoice) == [Status.CANCELLED]
    assert not InvoiceState.objects.exists()


def test_with_cascade_a_child_that_begins_at_this_moment_does_not(workflows: ModuleType) -> None:
    """Its first step is running, in a transaction that nobody else can see."""
    reached, cancelled = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert cancelled.wait(20)

    families(in_first_step=wait)
    publish(ParcelPosted())
    deliver(delivery_of(ParcelPosted).pk)
    child = delivery_of(SendInvoice).pk

    def cancel() -> None:
        assert reached.wait(20)
        cancel_instance(ParcelState.objects.get(), cascade=True)
        cancelled.set()

    if connection.vendor == "postgresql":
        at_once(lambda: deliver(child), cancel)
    else:  # one transaction writes at a time: between its claim and its run
        claimed = claim(child)
        assert claimed is not None
        reached.set()
        cancel()
        settle(claimed, run(claimed, ()))
    workflows.run_until_idle()

    assert statuses_of(SendInvoice) == [Status.CANCELLED]
    assert not InvoiceState.objects.exists()


# Raced with a step


def test_a_step_that_is_running_when_its_instance_is_cancelled_has_no_effect(
    workflows: ModuleType,
) -> None:
    """A3: its save is refused, and on the second run its message is ignored."""
    reached, cancelled = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert cancelled.wait(20)

    parcels(in_step=wait)
    publish(ParcelPosted(), ParcelScanned())
    deliver(delivery_of(ParcelPosted).pk)
    scan = delivery_of(ParcelScanned).pk

    def cancel() -> None:
        assert reached.wait(20)
        cancel_instance(ParcelState.objects.get())
        cancelled.set()

    if connection.vendor == "postgresql":
        ending, _none = at_once(lambda: deliver(scan), cancel)
    else:
        claimed = claim(scan)
        assert claimed is not None
        reached.set()
        cancel()
        ending = settle(claimed, run(claimed, ()))

    assert isinstance(ending, Ignored)
    state = ParcelState.objects.get()
    assert (state.lifecycle, state.seen) == ("cancelled", [])
    assert statuses_of(PrintLabel) == []
    assert delivery_of(ParcelScanned).attempts == 0


def test_a_step_raced_with_the_cancelling_of_its_instance_happens_whole_or_not_at_all() -> None:
    """B9 under fire: state and messages agree, and the instance is cancelled whoever was first."""
    parcels()
    rounds = 30 if connection.vendor == "postgresql" else 8
    outcomes = []

    for number in range(rounds):
        publish(ParcelPosted(number=number))
        deliver(delivery_of(ParcelPosted, status=Status.PENDING).pk)
        publish(ParcelScanned(number=number))
        scan = delivery_of(ParcelScanned, status=Status.PENDING).pk
        instance = ParcelState.objects.get(number=number)
        _, ending = at_once(lambda i=instance: cancel_instance(i), lambda s=scan: deliver(s))
        instance.refresh_from_db()
        labels = Delivery.objects.filter(
            message_name=PrintLabel.stored_name(), sender_instance_id=instance.pk
        ).count()
        outcomes.append((type(ending), instance.lifecycle, tuple(instance.seen), labels))

    whole = (Handled, "cancelled", ("scanned",), 1)
    none = (Ignored, "cancelled", (), 0)
    assert set(outcomes) <= {whole, none}, outcomes


def test_of_two_who_cancel_at_once_one_is_told_that_he_was_late(workflows: ModuleType) -> None:
    told = families()
    publish(ParcelPosted())
    workflows.run_until_idle()
    child = InvoiceState.objects.get()

    results = at_once(*[lambda: cancel_instance(child)] * 3)
    wait_until(lambda: workflows.run_until_idle() == 0)

    assert sorted(results) == [False, False, True]
    assert told == ["cancelled"]
