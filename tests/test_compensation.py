"""Undoing: noted commands, sent newest first, each when the one before is handled."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, connections, transaction

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    HandlerContext,
    Unrecoverable,
    Workflow,
    WorkflowContext,
    WorkflowEnded,
    cancel_instance,
    define_workflow,
    dispatch,
    handles,
    on_failure,
    outbox,
    publish,
    registry,
    relay,
    started_by,
    when,
    when_completed,
)
from django_workflows.models import Delivery, Lifecycle, Status
from tests.concurrency import wait_until
from tests.delivering import deliver_due, statuses_of
from tests.models import InvoiceState, Note, ParcelState, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry", "workflows")]

Context = WorkflowContext[TallyState]


class Begun(Event):
    key: str = "k"


class Do(Command):
    number: int


class Done(Event):
    number: int


class Undo(Command):
    number: int


class CalledOff(Event):
    key: str = "k"


class Mended(Event):
    """Somebody has seen to it by hand."""

    key: str = "k"


class Overdue(Command):
    pass


def a_process(*, fails_at: int = 0, steps: int = 4, silent: tuple[int, ...] = ()) -> None:
    """Does 1 to `steps`, one after the other, and notes the undoing of all but the silent ones.

    The command that fails for good makes it compensate; so does CalledOff. Mended completes it.
    """
    workflow = define_workflow(TallyState)

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.send(Do(number=1))

    @workflow.when(Done)
    def go_on(message: Done, state: TallyState, context: Context) -> None:
        state.seen.append(message.number)
        if message.number not in silent:
            context.compensate_with(Undo(number=message.number))
        if message.number < steps:
            context.send(Do(number=message.number + 1))
        else:
            context.complete()

    @workflow.on_failure(Do)
    def undo(command: Do, failure: CommandFailed, state: TallyState, context: Context) -> None:
        context.compensate()

    @workflow.when(CalledOff, lookup="key")
    def call_off(message: CalledOff, state: TallyState, context: Context) -> None:
        context.compensate()

    @workflow.when(Mended, lookup="key")
    def close(message: Mended, state: TallyState, context: Context) -> None:
        context.complete()

    @handles(Do)
    def do(message: Do, context: HandlerContext) -> None:
        if message.number == fails_at:
            context.fail("it cannot be done")
        context.reply(Done(number=message.number))


def undone_by(act: Callable[[int, HandlerContext], None] = lambda number, context: None) -> None:
    """A handler of Undo that writes a row for each, after `act`."""

    @handles(Undo, attempts=2, backoff=timedelta(minutes=1))
    def undo(message: Undo, context: HandlerContext) -> None:
        act(message.number, context)
        Note.objects.create(text=f"undone {message.number}")


def undone() -> list[int]:
    return [int(note.text.removeprefix("undone ")) for note in Note.objects.order_by("pk")]


def lifecycle() -> str:
    return str(TallyState.objects.get().lifecycle)


def undo_statuses() -> dict[int, str]:
    """Of each undo command where it stands, by its number."""
    rows = Delivery.objects.filter(undoes=True)
    return {Undo.model_validate_json(row.body).number: str(row.status) for row in rows}


def deliver_until(condition: Callable[[], bool]) -> None:
    """Deliver what is due, one by one, and stop as soon as the condition is true."""
    for _ in range(100):
        if condition():
            return
        for row in relay.take("default", 1):
            dispatch.deliver(row.id)
    pytest.fail("not true after 100 deliveries")


# What is undone


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_what_was_done_before_the_failure_is_undone_in_reverse_each_once(fails_at: int) -> None:
    """G48."""
    a_process(fails_at=fails_at)
    undone_by()

    publish(Begun())
    deliver_due()

    assert undone() == list(range(fails_at - 1, 0, -1))
    assert lifecycle() == Lifecycle.COMPENSATED


def test_nothing_is_undone_that_was_never_reached_or_not_noted() -> None:
    """G48: of skipped steps none."""
    a_process(fails_at=4, silent=(2,))
    undone_by()

    publish(Begun())
    deliver_due()

    assert undone() == [3, 1]
    assert Delivery.objects.filter(undoes=True).count() == 2


def test_the_next_is_not_even_pending_before_the_one_before_is_handled() -> None:
    """G48: strictly one after the other."""
    seen: dict[int, dict[int, str]] = {}
    a_process(fails_at=4)
    undone_by(lambda number, _context: seen.update({number: undo_statuses()}))

    publish(Begun())
    deliver_due()

    assert seen == {
        3: {3: "running", 2: "noted", 1: "noted"},
        2: {3: "handled", 2: "running", 1: "noted"},
        1: {3: "handled", 2: "handled", 1: "running"},
    }


def test_what_one_step_has_noted_is_undone_newest_first() -> None:
    workflow = define_workflow(TallyState)
    undone_by()

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        for number in range(1, 31):
            context.compensate_with(Undo(number=number))

    @workflow.when(CalledOff, lookup="key")
    def call_off(message: CalledOff, state: TallyState, context: Context) -> None:
        context.compensate()

    publish(Begun())
    deliver_due()
    publish(CalledOff())
    deliver_due(rounds=100)

    assert undone() == list(range(30, 0, -1))


def test_what_the_compensating_step_notes_itself_is_undone_first() -> None:
    workflow = define_workflow(TallyState)
    undone_by()

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.compensate_with(Undo(number=1))
        context.compensate()
        context.compensate_with(Undo(number=2))

    publish(Begun())
    deliver_due()

    assert undone() == [2, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def test_notes_of_a_step_that_rolled_back_do_not_exist() -> None:
    """A8 for notes: the failed attempt left none."""
    workflow = define_workflow(TallyState, attempts=3, backoff=timedelta(0))
    attempts: list[int] = []
    undone_by()

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.compensate_with(Undo(number=context.attempt))
        attempts.append(Delivery.objects.filter(undoes=True).count())
        if context.attempt < 3:
            raise ValueError("not yet")

    publish(Begun())
    deliver_due()

    assert attempts == [0, 0, 0]
    assert undo_statuses() == {3: "noted"}


def test_completing_cancels_what_was_noted() -> None:
    a_process(steps=3)
    undone_by()

    publish(Begun())
    deliver_due()

    assert lifecycle() == Lifecycle.COMPLETED
    assert not undone()
    assert undo_statuses() == {1: "cancelled", 2: "cancelled"}, "the completing step notes nothing"


def test_compensating_with_nothing_noted_ends_the_instance_at_once() -> None:
    a_process(silent=(1, 2, 3), fails_at=2)
    undone_by()

    publish(Begun())
    deliver_due()

    instance = TallyState.objects.get()
    assert instance.lifecycle == Lifecycle.COMPENSATED
    assert instance.ended_at is not None
    assert not Delivery.objects.filter(undoes=True).exists()


def test_compensating_cancels_what_the_instance_waits_for_itself() -> None:
    workflow = define_workflow(TallyState)
    undone_by()

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.send(Overdue(), delay=timedelta(hours=1))
        context.compensate_with(Undo(number=1))

    @workflow.when(Overdue)
    def give_up(message: Overdue, state: TallyState, context: Context) -> None: ...

    @workflow.when(CalledOff, lookup="key")
    def call_off(message: CalledOff, state: TallyState, context: Context) -> None:
        context.compensate()

    publish(Begun())
    deliver_due()
    publish(CalledOff())
    deliver_due()

    assert statuses_of(Overdue) == [Status.CANCELLED]
    assert undone() == [1]


def test_a_message_after_the_undoing_has_ended_is_ignored() -> None:
    a_process(fails_at=2)
    undone_by()
    publish(Begun())
    deliver_due()

    publish(CalledOff())
    deliver_due()

    assert statuses_of(CalledOff) == [Status.IGNORED]
    assert undone() == [1]


# Undo commands that fail


def test_a_failing_undo_command_is_retried_and_the_others_wait(workflows: ModuleType) -> None:
    """G49."""

    def fail_once(number: int, context: HandlerContext) -> None:
        if number == 2 and context.attempt == 1:
            raise ValueError("not now")

    a_process(fails_at=4)
    undone_by(fail_once)

    publish(Begun())
    deliver_due()
    before = (lifecycle(), undo_statuses())
    workflows.advance(timedelta(minutes=1))

    assert before == ("compensating", {3: "handled", 2: "pending", 1: "noted"})
    assert undone() == [3, 2, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def fail_at_two(number: int, context: HandlerContext) -> None:
    if number == 2 and not Note.objects.filter(text="mended").exists():
        raise Unrecoverable("not undoable")


def test_an_undo_command_that_failed_for_good_fails_the_instance_visibly() -> None:
    """G49: nothing is lost silently, and nothing is undone past it."""
    a_process(fails_at=4)
    undone_by(fail_at_two)

    publish(Begun())
    deliver_due()

    assert lifecycle() == Lifecycle.FAILED
    assert undo_statuses() == {3: "handled", 2: "failed", 1: "noted"}
    assert "not undoable" in Delivery.objects.get(undoes=True, status=Status.FAILED).error


def test_a_replay_carries_on_undoing_where_it_stopped() -> None:
    """G49."""
    a_process(fails_at=4)
    undone_by(fail_at_two)
    publish(Begun())
    deliver_due()

    Delivery.objects.filter(undoes=True).replay()
    deliver_due()
    again = lifecycle()
    mended = Note.objects.create(text="mended")
    Delivery.objects.filter(undoes=True).replay()
    deliver_due()

    mended.delete()
    assert again == Lifecycle.FAILED
    assert undone() == [3, 2, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def test_the_last_undo_command_that_failed_and_is_replayed_ends_the_instance() -> None:
    a_process(fails_at=3)
    undone_by(fail_at_two)
    publish(Begun())
    deliver_due()
    before = lifecycle()

    Note.objects.create(text="mended")
    Delivery.objects.filter(undoes=True).replay()
    deliver_due()

    assert before == Lifecycle.FAILED
    assert lifecycle() == Lifecycle.COMPENSATED
    assert undo_statuses() == {2: "handled", 1: "handled"}


def test_an_undo_command_whose_workers_died_too_often_fails_the_instance(settings: Any) -> None:
    """G49 and H55: the relay gives it up, and says so on the instance."""
    settings.DJANGO_WORKFLOWS = {"LOSSES": 1}
    a_process(fails_at=3)
    undone_by(lambda number, context: context.fail("never reached"))
    publish(Begun())
    deliver_until(lambda: "pending" in undo_statuses().values())

    Delivery.objects.filter(undoes=True, status=Status.PENDING).update(status=Status.RUNNING)
    relay.take("default", 10)

    assert undo_statuses() == {2: "failed", 1: "noted"}
    assert lifecycle() == Lifecycle.FAILED


def test_a_failed_instance_can_be_completed_by_a_step() -> None:
    """Somebody has mended it by hand: what was still noted is cancelled."""
    a_process(fails_at=4)
    undone_by(fail_at_two)
    publish(Begun())
    deliver_due()

    publish(Mended())
    deliver_due()

    assert lifecycle() == Lifecycle.COMPLETED
    assert undo_statuses() == {3: "handled", 2: "failed", 1: "cancelled"}


# While it compensates


def test_a_second_compensate_changes_nothing() -> None:
    """Neither does the next undo command leave early, nor does the instance end early."""
    called_off: list[int] = []

    def call_off_again(number: int, _context: HandlerContext) -> None:
        called_off.append(number)
        publish(CalledOff())

    a_process(fails_at=4)
    undone_by(call_off_again)
    publish(Begun())
    deliver_until(lambda: called_off == [3])

    before = undo_statuses()
    publish(CalledOff())
    deliver_until(lambda: Status.HANDLED in statuses_of(CalledOff))
    after = undo_statuses()
    deliver_due()

    assert before == {3: "handled", 2: "pending", 1: "noted"}
    assert after[1] == "noted"
    assert undone() == [3, 2, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def test_a_second_compensate_while_the_last_undo_command_is_on_its_way_ends_nothing() -> None:
    a_process(fails_at=2)
    undone_by()
    publish(Begun())
    deliver_until(lambda: undo_statuses() == {1: "pending"})
    Delivery.objects.filter(undoes=True).update(due_at=LATER, relay_at=LATER)

    publish(CalledOff())
    deliver_due()

    assert lifecycle() == Lifecycle.COMPENSATING
    assert statuses_of(CalledOff) == [Status.HANDLED]


def test_a_second_compensate_does_not_pass_over_an_undo_command_that_failed() -> None:
    a_process(fails_at=4)
    undone_by(fail_at_two)
    publish(Begun())
    deliver_due()

    publish(CalledOff())
    deliver_due()

    assert lifecycle() == Lifecycle.FAILED
    assert undo_statuses() == {3: "handled", 2: "failed", 1: "noted"}


def test_completing_while_it_compensates_does_not_stop_the_undoing() -> None:
    a_process(fails_at=4)
    undone_by()
    publish(Begun())
    deliver_until(lambda: undo_statuses().get(3) == "pending")

    publish(Mended())
    deliver_due()

    assert undone() == [3, 2, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def test_what_is_done_late_while_it_compensates_is_undone_too() -> None:
    """A reply that was slower than the failure of another command."""
    a_process(fails_at=3, steps=3)
    undone_by()
    publish(Begun())
    deliver_until(lambda: undo_statuses().get(2) == "pending")

    reply_to(TallyState.objects.get(), Done(number=9))
    deliver_due()

    assert TallyState.objects.get().seen == [1, 2, 9]
    assert undone() == [2, 9, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def reply_to(instance: TallyState, message: Event) -> None:
    """Deliver a reply to this instance, now."""
    [definition] = registry.current().workflows
    _id, new = outbox.prepare_reply(
        message, outbox.Origin(), outbox.Terms(), definition, instance.pk
    )
    with transaction.atomic(), connection.cursor() as cursor:
        outbox.write(cursor, [new])
    dispatch.deliver(new.id)


def test_cancelling_the_instance_while_it_compensates_stops_the_undoing() -> None:
    a_process(fails_at=4)
    undone_by()
    publish(Begun())
    deliver_until(lambda: undo_statuses().get(2) == "pending")

    cancel_instance(TallyState.objects.get())
    deliver_due()

    assert lifecycle() == Lifecycle.CANCELLED
    assert undo_statuses() == {3: "handled", 2: "handled", 1: "cancelled"}
    assert undone() == [3, 2], "what was on its way is not taken back"


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_what_is_noted_at_the_moment_of_the_last_undoing_is_undone_too() -> None:
    """The step that notes has written the instance and not yet committed."""
    a_process(fails_at=2)
    undone_by()
    publish(Begun())
    deliver_until(lambda: undo_statuses() == {1: "pending"})
    instance, late = TallyState.objects.get(), Delivery.objects.get(undoes=True)
    last = threading.Thread(target=deliver_in_thread, args=(late.pk,))

    with transaction.atomic():
        TallyState.objects.filter(pk=instance.pk).update(seen=[1, 2])
        last.start()
        wait_until(somebody_waits_for_a_lock)
        late.pk, late.message_id, late.body = uuid4(), uuid4(), Undo(number=2).model_dump_json()
        late.status, late.relay_at, late.version = Status.NOTED, None, instance.version + 1
        late.save(force_insert=True)
    last.join()
    deliver_due()

    assert undone() == [1, 2]
    assert lifecycle() == Lifecycle.COMPENSATED


# With other workflows


def test_an_undo_command_may_be_handled_by_a_workflow() -> None:
    a_process(fails_at=3)
    refund = define_workflow(ParcelState)
    seen: list[dict[int, str]] = []

    @refund.started_by(Undo)
    def begin(message: Undo, state: ParcelState, context: WorkflowContext[ParcelState]) -> None:
        state.number = message.number
        seen.append(undo_statuses())

    publish(Begun())
    deliver_due()

    assert seen == [{2: "running", 1: "noted"}, {2: "handled", 1: "running"}]
    assert list(ParcelState.objects.order_by("pk").values_list("number", flat=True)) == [2, 1]
    assert lifecycle() == Lifecycle.COMPENSATED


def test_an_undo_command_may_be_handled_by_the_workflow_that_noted_it() -> None:
    class Selfish(Workflow[TallyState]):
        @started_by(Begun, once_per="key")
        def begin(self, message: Begun) -> None:
            self.compensate_with(Undo(number=1))
            self.compensate_with(Undo(number=2))

        @when(CalledOff, lookup="key")
        def call_off(self, message: CalledOff) -> None:
            self.compensate()

        @when(Undo)
        def undo(self, message: Undo) -> None:
            self.state.seen.append(message.number)

    publish(Begun())
    deliver_due()
    publish(CalledOff())
    deliver_due()

    instance = TallyState.objects.get()
    assert instance.seen == [2, 1]
    assert instance.lifecycle == Lifecycle.COMPENSATED


class Start(Event):
    pass


def a_parent() -> list[str]:
    """Starts the process as its child; the outcomes that it is told of."""
    outcomes: list[str] = []

    class Child(Workflow[TallyState]):
        @started_by(Do)
        def begin(self, message: Do) -> None:
            self.state.key = str(message.number)
            self.compensate_with(Undo(number=2))
            self.compensate()

    class Parent(Workflow[InvoiceState]):
        @started_by(Start)
        def begin(self, message: Start) -> None:
            self.send(Do(number=1))

        @when_completed(Child)
        def hear(self, message: WorkflowEnded) -> None:
            outcomes.append(message.outcome)

    return outcomes


def test_a_parent_is_told_once_that_its_child_was_compensated() -> None:
    outcomes = a_parent()
    undone_by()

    publish(Start())
    deliver_due()

    assert outcomes == ["compensated"]


def test_a_parent_is_told_when_a_replay_has_ended_the_undoing_of_its_child() -> None:
    outcomes = a_parent()
    undone_by(fail_at_two)
    publish(Start())
    deliver_due()
    before = list(outcomes)

    Note.objects.create(text="mended")
    Delivery.objects.filter(undoes=True).replay()
    deliver_due()

    assert before == []
    assert outcomes == ["compensated"]


def test_an_undo_command_that_failed_is_not_told_as_a_command_that_failed() -> None:
    """Its failure stops the undoing; `on_failure` is for what the process did."""
    told: list[str] = []

    class Careful(Workflow[TallyState]):
        @started_by(Begun, once_per="key")
        def begin(self, message: Begun) -> None:
            self.compensate_with(Undo(number=2))
            self.compensate()

        @on_failure(Undo)
        def hear(self, command: Undo, failure: CommandFailed) -> None:
            told.append(failure.error)

    undone_by(fail_at_two)

    publish(Begun())
    deliver_due()

    assert told == []
    assert lifecycle() == Lifecycle.FAILED


LATER = datetime(2100, 1, 1, tzinfo=UTC)


def deliver_in_thread(delivery_id: UUID) -> None:
    try:
        dispatch.deliver(delivery_id)
    finally:
        connections.close_all()


def somebody_waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_stat_clear_snapshot(), count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(cursor.fetchone()[1])
