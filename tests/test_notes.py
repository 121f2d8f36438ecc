"""Notes of what undoes a step: when they exist, and what may bring them back."""

from typing import Any

import pytest
from django.db import transaction

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    WorkflowContext,
    define_workflow,
    dispatch,
    handles,
    publish,
)
from django_workflows.models import Delivery, Lifecycle, Status
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import Note, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]

Context = WorkflowContext[TallyState]


class Begun(Event):
    key: str = "k"


class Ended(Event):
    key: str = "k"


class GivenUp(Event):
    key: str = "k"


class Undo(Command):
    number: int


class Declined(Exception):
    """What rolls a block of a step back."""


def a_process(begin: Any) -> None:
    """Begun calls `begin`, Ended completes, GivenUp compensates, and Undo writes a row."""
    workflow = define_workflow(TallyState)

    @workflow.started_by(Begun, once_per="key")
    def start(message: Begun, state: TallyState, context: Context) -> None:
        begin(context)

    @workflow.when(Ended, lookup="key")
    def end(message: Ended, state: TallyState, context: Context) -> None:
        context.complete()

    @workflow.when(GivenUp, lookup="key")
    def give_up(message: GivenUp, state: TallyState, context: Context) -> None:
        context.compensate()

    @handles(Undo)
    def undo(message: Undo, context: HandlerContext) -> None:
        Note.objects.create(text=str(message.number))


def undone() -> list[str]:
    return list(Note.objects.order_by("pk").values_list("text", flat=True))


def test_a_note_in_a_block_that_is_rolled_back_does_not_exist() -> None:
    def declined(context: Context) -> None:
        with transaction.atomic():
            context.compensate_with(Undo(number=2))
            raise Declined

    def begin(context: Context) -> None:
        context.compensate_with(Undo(number=1))
        with pytest.raises(Declined):
            declined(context)

    a_process(begin)

    publish(Begun())
    deliver_due()
    publish(GivenUp())
    deliver_due()

    assert undone() == ["1"]


def test_a_note_in_a_block_is_undone_in_its_turn() -> None:
    def begin(context: Context) -> None:
        with transaction.atomic():
            context.compensate_with(Undo(number=1))
        context.compensate_with(Undo(number=2))

    a_process(begin)

    publish(Begun())
    deliver_due()
    publish(GivenUp())
    deliver_due()

    assert undone() == ["2", "1"]
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED


def test_a_step_that_discards_leaves_no_note_not_even_of_a_block() -> None:
    def begin(context: Context) -> None:
        context.compensate_with(Undo(number=1))
        with transaction.atomic():
            context.compensate_with(Undo(number=2))
        context.discard()

    a_process(begin)

    publish(Begun())
    deliver_due()

    assert not Delivery.objects.filter(undoes=True).exists()


def test_a_replay_of_everything_does_not_undo_what_was_completed() -> None:
    a_process(lambda context: context.compensate_with(Undo(number=1)))
    publish(Begun())
    deliver_due()
    publish(Ended())
    deliver_due()

    count = Delivery.objects.all().replay()
    deliver_due()

    assert count == 0
    assert statuses_of(Undo) == [Status.CANCELLED]
    assert not undone()


def test_an_undo_command_that_is_replayed_beside_another_does_not_send_a_third() -> None:
    def begin(context: Context) -> None:
        for number in (1, 2, 3):
            context.compensate_with(Undo(number=number))

    a_process(begin)
    publish(Begun())
    deliver_due()
    newest = Delivery.objects.filter(undoes=True).order_by("pk").last()
    assert newest is not None
    Delivery.objects.filter(pk=newest.pk).update(status=Status.IGNORED)
    publish(GivenUp())
    dispatch.deliver(delivery_of(GivenUp).pk)

    Delivery.objects.filter(pk=newest.pk).replay()
    unended = Delivery.objects.filter(undoes=True, status=Status.PENDING).count()
    deliver_due()

    assert unended == 2
    assert sorted(undone()) == ["1", "2", "3"]
    assert undone()[-1] == "1"
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED
