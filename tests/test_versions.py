"""How the version of a state counts, and what a key that must be unique refuses."""

from typing import Any
from uuid import UUID

import pytest
from django.db import IntegrityError

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
from django_workflows.models import Delivery, Lifecycle, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import SlotState, TallyState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class TallyOpened(Event):
    key: str


class Counted(Event):
    key: str
    by: int = 1


class Looked(Event):
    key: str


class Asked(Event):
    key: str


class Answer(Command):
    pass


class SlotTaken(Event):
    key: str


class SlotLeft(Event):
    key: str


# Counting


def tally() -> None:
    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None: ...

        @when(Counted, lookup="key")
        def count(self, message: Counted) -> None:
            self.state.total += message.by

        @when(Looked, lookup="key")
        def look(self, message: Looked) -> None:
            self.state.total = int(self.state.total)

        @when(Asked, lookup="key")
        def only_send(self, message: Asked) -> None:
            self.send(Answer())

    @handles(Answer)
    def answer(message: Answer, context: HandlerContext) -> None: ...


# A5
def test_the_version_is_1_on_insert_and_moves_on_by_1_with_each_step_that_saves() -> None:
    tally()
    versions = []

    for message in (TallyOpened(key="k"), Counted(key="k"), Counted(key="k")):
        publish(message)
        deliver_due()
        versions.append(TallyState.objects.get().version)

    assert versions == [1, 2, 3]
    recorded = Delivery.objects.order_by("id").values_list("version", flat=True)
    assert list(recorded) == [1, 2, 3]


# A5
def test_the_version_stays_at_a_step_that_neither_changed_nor_sent() -> None:
    tally()
    publish(TallyOpened(key="k"))
    deliver_due()
    before = TallyState.objects.values().get()

    publish(Looked(key="k"))
    deliver_due()

    assert TallyState.objects.values().get() == before
    assert delivery_of(Looked).status == Status.HANDLED


# A5
def test_the_version_moves_on_at_a_step_that_only_sent() -> None:
    tally()
    publish(TallyOpened(key="k"))
    deliver_due()

    publish(Asked(key="k"))
    deliver_due()

    assert TallyState.objects.get().version == 2


# A5
def test_the_version_is_counted_by_saves_outside_a_step_too() -> None:
    state = TallyState(key="k")
    versions = [state.version]

    for _ in range(3):
        state.save()
        versions.append(state.version)

    assert versions == [0, 1, 2, 3]
    assert TallyState.objects.get().version == 3


# A5
def test_the_version_in_memory_is_unchanged_by_a_save_that_failed() -> None:
    TallyState.objects.create(key="other")
    state = TallyState.objects.create(key="k")
    state.key = "other"

    with pytest.raises(IntegrityError):
        state.save()

    assert state.version == 1
    state.key = "k"
    state.save()
    assert state.version == 2


# A6
def test_two_loads_of_one_instance_are_distinct_objects() -> None:
    loaded: list[TallyState] = []
    workflow = define_workflow(TallyState)

    @workflow.started_by(TallyOpened, once_per="key")
    def open_(message: TallyOpened, state: TallyState, context: Any) -> None:
        state.seen = [{"by": 0}]

    @workflow.when(Counted, lookup="key")
    def count(message: Counted, state: TallyState, context: Any) -> None:
        loaded.append(state)
        if message.by:
            state.seen[0]["by"] = message.by
            context.discard()

    publish(TallyOpened(key="k"))
    deliver_due()
    publish(Counted(key="k", by=1), Counted(key="k", by=0))
    deliver_due()

    assert loaded[0] is not loaded[1]
    assert loaded[0].pk == loaded[1].pk
    assert sorted(state.seen[0]["by"] for state in loaded) == [0, 1]
    assert TallyState.objects.get().seen == [{"by": 0}]


# The unique key


def slots_without_once_per() -> None:
    """The key is unique among the running instances: the step itself sets it."""
    workflow = define_workflow(SlotState)

    @workflow.started_by(SlotTaken)
    def take(message: SlotTaken, state: SlotState, context: WorkflowContext[SlotState]) -> None:
        state.key = message.key

    @workflow.when(SlotLeft, lookup="key")
    def leave(message: SlotLeft, state: SlotState, context: WorkflowContext[SlotState]) -> None:
        context.complete()


def running_slots(key: str) -> list[UUID]:
    return list(SlotState.objects.filter(key=key, ended_at=None).values_list("pk", flat=True))


# A4
def test_a_second_running_instance_with_the_key_is_refused() -> None:
    slots_without_once_per()
    publish(SlotTaken(key="k"))
    deliver_due()
    [first] = running_slots("k")

    publish(SlotTaken(key="k"))
    deliver_due()

    refused = Delivery.objects.get(status=Status.PENDING)
    assert running_slots("k") == [first]
    assert "IntegrityError" in refused.error or "UniqueViolation" in refused.error
    assert refused.attempts == 1


# A4
def test_the_key_is_free_for_another_workflow() -> None:
    slots_without_once_per()
    tally()

    publish(SlotTaken(key="k"), TallyOpened(key="k"))
    deliver_due()

    assert len(running_slots("k")) == 1
    assert TallyState.objects.get().key == "k"


# A4
def test_the_key_is_free_again_after_the_end_where_the_constraint_says_so() -> None:
    slots_without_once_per()
    publish(SlotTaken(key="k"))
    deliver_due()
    [first] = running_slots("k")

    publish(SlotLeft(key="k"))
    deliver_due()
    publish(SlotTaken(key="k"))
    deliver_due()

    [second] = running_slots("k")
    assert second != first
    assert SlotState.objects.get(pk=first).lifecycle == Lifecycle.COMPLETED


# A4
def test_the_key_stays_taken_after_the_end_where_the_constraint_says_so() -> None:
    workflow = define_workflow(TallyState)

    @workflow.started_by(TallyOpened, once_per="key")
    def open_and_end(message: TallyOpened, state: TallyState, context: Any) -> None:
        context.complete()

    publish(TallyOpened(key="k"))
    deliver_due()
    [first] = TallyState.objects.values_list("pk", flat=True)

    publish(TallyOpened(key="k"))
    deliver_due()

    assert list(TallyState.objects.values_list("pk", flat=True)) == [first]
    assert str(first) in Delivery.objects.get(status=Status.IGNORED).reason
