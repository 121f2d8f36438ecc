"""What an instance's timeline says, and what it says the instance waits for."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Unrecoverable,
    WorkflowContext,
    cancel_instance,
    define_workflow,
    handles,
    publish,
)
from django_workflows.models import Delivery, Lifecycle, Status
from django_workflows.skipping import skip
from django_workflows.timeline import (
    CHILDREN,
    LISTED,
    Sent,
    Timeline,
    Waiting,
    neighbours_of,
    relatives_of,
    timeline_of,
    waiting_of,
)
from tests.delivering import deliver_due, delivery_of
from tests.models import InvoiceState, ParcelState, TallyState
from tests.stored import stored

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Context = WorkflowContext[TallyState]


class Begun(Event):
    key: str = "k"


class Do(Command):
    pass


class Done(Event):
    pass


class Undo(Command):
    pass


class Overdue(Command):
    pass


class Bill(Command):
    pass


class Billed(Event):
    pass


class CalledOff(Event):
    key: str = "k"


class PartIn(Event):
    key: str = "k"


class OtherPartIn(Event):
    key: str = "k"


def a_workflow(*, told: bool = False, joins: bool = False) -> Any:
    """Sends Do and a timeout, and notes Undo; CalledOff undoes."""
    workflow = define_workflow(TallyState)

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.send(Do())
        context.send(Overdue(), delay=timedelta(hours=1))
        context.compensate_with(Undo())

    @workflow.when(Done)
    def go_on(message: Done, state: TallyState, context: Context) -> None:
        state.total += 1

    @workflow.when(Overdue)
    def give_up(message: Overdue, state: TallyState, context: Context) -> None:
        context.complete()

    @workflow.when(CalledOff, lookup="key")
    def call_off(message: CalledOff, state: TallyState, context: Context) -> None:
        context.compensate()

    if told:
        on_failure = workflow.on_failure(Do)
        on_failure(lambda command, failure, state, context: None)
    if joins:

        @workflow.when_all(PartIn, OtherPartIn, lookup="key")
        def put_together(messages: Any, state: TallyState, context: Context) -> None:
            state.total = 100

    return workflow


def do_answers() -> None:
    handles(Do, name="tests.do")(lambda message, context: context.reply(Done()))
    handles(Undo, name="tests.undo")(lambda message, context: None)


def do_fails(attempts: int = 1) -> None:
    @handles(Do, name="tests.do", attempts=attempts)
    def do(message: Do, context: HandlerContext) -> None:
        raise ValueError("no ink")

    handles(Undo, name="tests.undo")(lambda message, context: None)


def begun() -> TallyState:
    publish(Begun())
    deliver_due()
    return TallyState.objects.get()


def told_by(timeline: Timeline) -> list[tuple[str, str]]:
    return [
        (entry.kind, entry.delivery.message_name.removeprefix("tests."))
        for entry in timeline.entries
    ]


def names_in(groups: list[Sent]) -> list[str]:
    return [group.listed[0].message_name.removeprefix("tests.") for group in groups]


def everything_in(waiting: Waiting) -> dict[str, Any]:
    return {name: value for name, value in vars(waiting).items() if value}


# What has happened


def test_everything_that_reached_the_instance_is_told_in_order() -> None:
    a_workflow()
    do_answers()
    instance = begun()

    timeline = timeline_of(instance)

    assert told_by(timeline) == [("started", "Begun"), ("handled", "Done"), ("pending", "Overdue")]
    first, second, last = timeline.entries
    assert (first.delivery.step, second.delivery.step) == ("begin", "go_on")
    assert second.delivery.changes == {"total": [0, 1]}
    assert last.at is None


def test_what_a_step_sent_and_noted_is_told_with_it() -> None:
    a_workflow()
    do_answers()
    instance = begun()

    first, *others = timeline_of(instance).entries

    assert {sent.message_name for sent in first.sent.listed} == {
        Do.stored_name(),
        Overdue.stored_name(),
        Undo.stored_name(),
    }
    assert first.sent.in_all == 3
    assert [entry.sent.in_all for entry in others] == [0, 0]


def test_of_what_a_step_sent_in_great_number_the_first_are_listed_and_all_counted() -> None:
    workflow = define_workflow(TallyState)
    handles(Do, name="tests.do")(lambda message, context: None)

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.send(*[Do() for _ in range(100)])

    instance = begun()

    [entry] = timeline_of(instance).entries
    assert (len(entry.sent.listed), entry.sent.in_all) == (LISTED, 100)
    assert entry.sent.others == 100 - LISTED


def test_what_another_instance_sent_for_the_same_reason_is_not_told() -> None:
    a_workflow()
    do_answers()
    instance = begun()
    cause = delivery_of(Begun)
    stored(sender_instance_id=uuid4(), causation_id=cause.message_id, message_name="x.Y")

    first, *_others = timeline_of(instance).entries

    assert "x.Y" not in {sent.message_name for sent in first.sent.listed}


def test_ignored_failed_cancelled_and_skipped_are_told_apart() -> None:
    a_workflow()
    do_answers()
    instance = begun()
    publish(Begun())
    deliver_due()
    stored(handler="tests.TallyState", instance_id=instance.pk, message_name="tests.A")
    stored(
        handler="tests.TallyState",
        instance_id=instance.pk,
        message_name="tests.B",
        status=Status.CANCELLED,
    )
    skipped = stored(handler="tests.TallyState", instance_id=instance.pk, message_name="tests.C")
    skip(Delivery.objects.filter(pk=skipped.pk), reason="Ada did it.")

    told = told_by(timeline_of(instance))

    assert {("ignored", "Begun"), ("failed", "A"), ("cancelled", "B"), ("by hand", "C")} <= set(
        told
    )


def test_an_arrival_for_a_join_is_told_as_one_and_then_the_step() -> None:
    a_workflow(joins=True)
    do_answers()
    instance = begun()

    publish(PartIn())
    publish(OtherPartIn())
    deliver_due()

    told = told_by(timeline_of(instance))
    assert told[2:] == [
        ("arrived", "PartIn"),
        ("arrived", "OtherPartIn"),
        ("handled", "django_workflows.JoinComplete"),
        ("pending", "Overdue"),
    ]


def test_what_was_undone_is_told_and_what_is_only_noted_is_not() -> None:
    a_workflow()
    do_answers()
    instance = begun()
    before = told_by(timeline_of(instance))

    publish(CalledOff())
    deliver_due()

    after = told_by(timeline_of(instance))
    assert not [name for _kind, name in before if name == "Undo"]
    assert after[-1] == ("undone", "Undo")


def test_a_failed_attempt_is_told_with_the_end_of_its_traceback() -> None:
    a_workflow(told=True)
    do_answers()

    instance = begun()
    failed = stored(
        handler="tests.TallyState",
        instance_id=instance.pk,
        traceback="first line\n" + "x" * 10_000 + "\nlast line",
    )

    [entry] = [e for e in timeline_of(instance).entries if e.delivery.pk == failed.pk]
    end: Any = entry.delivery
    assert end.traceback_end.endswith("last line")
    assert "first line" not in end.traceback_end


def test_a_long_timeline_comes_in_pages_newest_first_each_in_order() -> None:
    instance = ParcelState.objects.create()
    rows = [stored(instance_id=instance.pk).pk for _ in range(25)]

    pages = [timeline_of(instance, page=page, size=10) for page in (1, 2, 3)]

    told = [[entry.delivery.pk for entry in page.entries] for page in pages]
    assert told == [rows[15:], rows[5:15], rows[:5]]
    assert [page.has_older for page in pages] == [True, True, False]
    assert not pages[0].is_whole


def test_the_number_of_queries_does_not_grow() -> None:
    a_workflow()
    do_answers()
    instance = begun()

    def ask() -> None:
        timeline = timeline_of(instance)
        waiting_of(instance, timeline)
        relatives_of(instance)
        neighbours_of(instance, timeline)

    with CaptureQueriesContext(connection) as few:
        ask()
    for _ in range(50):
        stored(instance_id=instance.pk, sender_instance_id=uuid4())
        stored(sender_instance_id=instance.pk, status=Status.PENDING)
    with CaptureQueriesContext(connection) as many:
        ask()

    assert len(many) == len(few) == 6


# What it waits for


def test_a_command_that_is_not_handled_yet_and_a_timeout_are_waited_for() -> None:
    a_workflow()
    do_fails(attempts=2)

    waiting = waiting_of(begun())

    assert names_in(waiting.commands) == ["Do"]
    assert names_in(waiting.timeouts) == ["Overdue"]
    assert names_in(waiting.noted) == ["Undo"]
    assert [step.name for step in waiting.unseen] == ["go_on", "give_up", "call_off"]
    assert not waiting.failed


def test_a_command_that_failed_unheeded_holds_it_up() -> None:
    a_workflow()
    do_fails()

    waiting = waiting_of(begun())

    assert names_in(waiting.failed) == ["Do"]
    assert not waiting.told
    assert not waiting.commands


def test_a_command_that_failed_and_is_heeded_does_not_hold_it_up() -> None:
    a_workflow(told=True)
    do_fails()

    waiting = waiting_of(begun())

    assert names_in(waiting.told) == ["Do"]
    assert not waiting.failed


def test_a_command_that_was_handled_without_an_answer_is_named() -> None:
    a_workflow()
    handles(Do, name="tests.do")(lambda message, context: None)
    handles(Undo, name="tests.undo")(lambda message, context: None)
    instance = begun()

    unanswered = waiting_of(instance, timeline_of(instance)).unanswered

    assert [sent.message_name for sent in unanswered] == [Do.stored_name()]


def test_a_command_that_was_answered_is_not_waited_for() -> None:
    a_workflow()
    do_answers()
    instance = begun()

    waiting = waiting_of(instance, timeline_of(instance))

    assert not waiting.unanswered
    assert not waiting.commands


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_child_answers_by_whatever_it_sends_however_late(has_answered: bool) -> None:
    parent, child = a_parent_and_its_child()
    if has_answered:
        stored(
            handler="tests.TallyState",
            instance_id=parent.pk,
            sender="tests.InvoiceState",
            sender_instance_id=child.pk,
            causation_id=uuid4(),
            status=Status.HANDLED,
            step="on_billed",
        )

    unanswered = waiting_of(parent, timeline_of(parent)).unanswered

    assert [sent.handler for sent in unanswered] == ([] if has_answered else ["tests.InvoiceState"])


def test_an_undo_command_that_failed_is_where_the_undoing_stopped() -> None:
    a_workflow()
    handles(Do, name="tests.do")(lambda message, context: None)

    @handles(Undo, name="tests.undo")
    def undo(message: Undo, context: HandlerContext) -> None:
        raise Unrecoverable("it cannot be undone")

    begun()
    publish(CalledOff())
    deliver_due()

    instance = TallyState.objects.get()
    assert instance.lifecycle == Lifecycle.FAILED
    assert names_in(waiting_of(instance).undo_failed) == ["Undo"]


def test_a_join_says_how_many_have_arrived_and_which_are_missing() -> None:
    a_workflow(joins=True)
    do_answers()
    begun()
    publish(PartIn())
    deliver_due()

    [join] = waiting_of(TallyState.objects.get()).joins

    assert (join.step.name, join.arrived, join.needed) == ("put_together", 1, 2)
    assert join.missing == [OtherPartIn.stored_name()]


def test_a_join_that_has_run_is_not_waited_for() -> None:
    a_workflow(joins=True)
    do_answers()
    begun()
    publish(PartIn())
    publish(OtherPartIn())
    deliver_due()

    assert not waiting_of(TallyState.objects.get()).joins


def test_what_waits_alike_is_one_group_with_its_number() -> None:
    a_workflow()
    do_answers()
    instance = begun()
    for _ in range(30):
        stored(sender_instance_id=instance.pk, status=Status.PENDING, sender="tests.TallyState")

    [group] = waiting_of(instance).commands

    assert (len(group.listed), group.in_all) == (LISTED, 30)


def test_an_instance_that_has_ended_waits_for_nothing() -> None:
    a_workflow()
    do_fails()
    cancel_instance(begun())

    waiting = waiting_of(TallyState.objects.get())

    assert everything_in(waiting) == {}


def test_an_instance_whose_workflow_is_gone_waits_for_nothing() -> None:
    instance = ParcelState.objects.create()
    stored(instance_id=instance.pk)

    assert everything_in(waiting_of(instance)) == {}
    assert len(timeline_of(instance).entries) == 1


# Whom it is related to


def a_parent_and_its_child() -> tuple[TallyState, InvoiceState]:
    parent = define_workflow(TallyState)
    child = define_workflow(InvoiceState)
    parent.started_by(Begun, once_per="key")(lambda m, state, context: context.send(Bill()))
    parent.when(Billed)(lambda message, state, context: None)
    child.started_by(Bill)(lambda message, state, context: None)
    return begun(), InvoiceState.objects.get()


def test_an_instance_leads_to_the_one_that_started_it_and_back() -> None:
    parent, child = a_parent_and_its_child()

    [up], [down] = relatives_of(child), relatives_of(parent)

    assert (up.kind, up.workflow, up.id) == ("parent", "tests.TallyState", parent.pk)
    assert (down.kind, down.workflow, down.id) == ("child", "tests.InvoiceState", child.pk)
    assert down.lifecycle == Lifecycle.RUNNING


def test_of_many_children_not_all_are_read() -> None:
    parent, _child = a_parent_and_its_child()
    for _ in range(CHILDREN + 10):
        InvoiceState.objects.create(starter_workflow="tests.TallyState", starter_id=parent.pk)

    assert len(relatives_of(parent)) == CHILDREN + 1


def test_an_instance_that_got_an_event_from_this_one_is_its_neighbour() -> None:
    a_workflow()
    do_answers()
    instance = begun()
    other = uuid4()
    cause = delivery_of(Begun)
    stored(
        sender="tests.TallyState",
        sender_instance_id=instance.pk,
        causation_id=cause.message_id,
        handler="tests.ParcelState",
        instance_id=other,
        status=Status.HANDLED,
    )

    neighbours = neighbours_of(instance, timeline_of(instance))

    assert [(one.workflow, one.id) for one in neighbours] == [("tests.ParcelState", other)]


def test_an_instance_further_away_in_the_conversation_is_its_neighbour() -> None:
    a_workflow()
    do_answers()
    instance = begun()
    other = uuid4()
    conversation = delivery_of(Begun).correlation_id
    stored(
        correlation_id=conversation,
        sender="tests.do",
        handler="tests.ParcelState",
        instance_id=other,
        status=Status.HANDLED,
    )
    stored(handler="tests.ParcelState", instance_id=uuid4(), status=Status.HANDLED)

    neighbours = neighbours_of(instance, timeline_of(instance))

    assert [one.id for one in neighbours] == [other]
