"""Messages of one instance that are handled at the same moment."""

import threading

import pytest
from django.db import connection
from django.db.models import Sum

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    handles,
    publish,
    started_by,
    when,
)
from django_workflows.endings import Handled, Lost
from django_workflows.models import Delivery, Status
from tests.concurrency import at_once, wait_until
from tests.delivering import deliver_due, delivery_of
from tests.models import Note, TallyState
from tests.racing import Meeting, deliver_at_once, work_on_all

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class TallyOpened(Event):
    key: str


class TallyAdopted(Event):
    key: str


class Counted(Event):
    key: str


class WriteNote(Command):
    text: str


def notes_are_written() -> None:
    @handles(WriteNote)
    def write_note(message: WriteNote, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


def tally_starting_with(meeting: Meeting) -> None:
    """Either of two messages starts an instance, or continues the one that is there."""

    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None:
            meeting()
            self.state.seen.append("opened")

        @started_by(TallyAdopted, once_per="key")
        def adopt(self, message: TallyAdopted) -> None:
            meeting()
            self.state.seen.append("adopted")

        @when(TallyOpened, lookup="key")
        def go_on_opened(self, message: TallyOpened) -> None:
            self.state.seen.append("opened later")

        @when(TallyAdopted, lookup="key")
        def go_on_adopted(self, message: TallyAdopted) -> None:
            self.state.seen.append("adopted later")


# A1
def test_two_start_messages_of_one_key_at_once_make_one_instance_that_saw_both() -> None:
    tally_starting_with(Meeting(2))
    publish(TallyOpened(key="k"), TallyAdopted(key="k"))

    endings = deliver_at_once(*Delivery.objects.values_list("pk", flat=True))

    assert all(isinstance(ending, Handled) for ending in endings)
    state = TallyState.objects.get()
    assert sorted(state.seen) in (["adopted", "opened later"], ["adopted later", "opened"])
    assert state.version == 2


# A1, with the same message twice: the second one has no step to continue with
def test_two_starts_at_once_without_a_step_to_go_on_with_make_one_instance() -> None:
    meeting = Meeting(2)

    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None:
            meeting()
            self.send(WriteNote(text="opened"))

    notes_are_written()
    publish(TallyOpened(key="k"), TallyOpened(key="k"))

    deliver_at_once(*Delivery.objects.values_list("pk", flat=True))
    deliver_due()

    state = TallyState.objects.get()
    ignored = Delivery.objects.get(status=Status.IGNORED)
    assert str(state.pk) in ignored.reason
    assert Note.objects.count() == 1


def counting_tally(meeting: Meeting, runs: list[str] | None = None) -> None:
    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None: ...

        @when(Counted, lookup="key")
        def count(self, message: Counted) -> None:
            meeting()
            if runs is not None:
                runs.append("run")
            self.state.total += 1


# A2
def test_three_messages_of_one_instance_at_once_all_take_effect() -> None:
    counting_tally(Meeting(3))
    publish(TallyOpened(key="k"))
    deliver_due()
    publish(*[Counted(key="k")] * 3)

    deliver_at_once(*Delivery.objects.filter(status="pending").values_list("pk", flat=True))
    deliver_due()

    counted = Delivery.objects.filter(message_name=Counted.stored_name())
    assert TallyState.objects.get().total == 3
    assert [delivery.status for delivery in counted] == [Status.HANDLED] * 3
    assert sorted(delivery.version for delivery in counted) == [2, 3, 4]
    if connection.vendor != "sqlite":  # where the three did meet, two of them ran again
        assert counted.aggregate(extra=Sum("conflicts"))["extra"] >= 2
    assert {delivery.attempts for delivery in counted} == {0}


# A7
@pytest.mark.postgres  # on SQLite nobody can take the delivery while the first step runs
def test_a_step_that_only_sends_raced_by_a_copy_of_itself_sends_one_set() -> None:
    first_is_in, second_is_done = threading.Event(), threading.Event()

    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None: ...

        @when(Counted, lookup="key")
        def only_send(self, message: Counted) -> None:
            self.send(WriteNote(text="one"), WriteNote(text="two"))
            if not first_is_in.is_set():
                first_is_in.set()
                assert second_is_done.wait(20)

    notes_are_written()
    publish(TallyOpened(key="k"))
    deliver_due()
    publish(Counted(key="k"))
    counted = delivery_of(Counted)

    def deliver_slowly() -> object:
        return deliver_at_once(counted.pk)[0]

    def take_it_away_and_deliver() -> object:
        wait_until(first_is_in.is_set)
        # As the relay does once the lease has run out.
        Delivery.objects.filter(pk=counted.pk).update(status=Status.PENDING)
        try:
            return deliver_at_once(counted.pk)[0]
        finally:
            second_is_done.set()

    slow, fast = at_once(deliver_slowly, take_it_away_and_deliver)
    deliver_due()

    assert isinstance(fast, Handled)
    assert isinstance(slow, Lost)
    assert sorted(Note.objects.values_list("text", flat=True)) == ["one", "two"]
    assert TallyState.objects.get().version == 2


# A8
def test_a_hundred_events_for_one_instance_from_eight_threads_are_all_applied(
    capfd: pytest.CaptureFixture[str],
) -> None:
    runs: list[str] = []
    counting_tally(Meeting(1), runs)
    publish(TallyOpened(key="k"))
    deliver_due()
    publish(*[Counted(key="k")] * 100)

    work_on_all(threads=8)

    counted = Delivery.objects.filter(message_name=Counted.stored_name())
    extra = counted.aggregate(extra=Sum("conflicts"))["extra"]
    with capfd.disabled():
        print(f"\n100 events from 8 threads on {connection.vendor}: {extra} extra runs")  # noqa: T201
    assert TallyState.objects.get().total == 100
    assert set(counted.values_list("status", "attempts")) == {(Status.HANDLED, 0)}
    assert TallyState.objects.get().version == 101
    assert len(runs) == 100 + extra


# B13
@pytest.mark.parametrize("kind", ["a step", "a start", "a plain handler"])
def test_a_delivery_that_arrives_three_times_at_once_is_handled_once(kind: str) -> None:
    notes_are_written()
    runs: list[str] = []

    if kind == "a plain handler":

        @handles(Counted)
        def count(message: Counted, context: HandlerContext) -> None:
            runs.append("run")
            context.send(WriteNote(text="sent"))

    else:

        class Tally(Workflow[TallyState]):
            @started_by(TallyOpened, once_per="key")
            def open(self, message: TallyOpened) -> None:
                if kind == "a start":
                    runs.append("run")
                    self.send(WriteNote(text="sent"))

            @when(Counted, lookup="key")
            def count(self, message: Counted) -> None:
                runs.append("run")
                self.send(WriteNote(text="sent"))

        publish(TallyOpened(key="k"))
        if kind == "a step":
            deliver_due()
    if kind != "a start":
        publish(Counted(key="k"))
    [delivery_id] = Delivery.objects.filter(status="pending").values_list("pk", flat=True)

    endings = deliver_at_once(delivery_id, delivery_id, delivery_id)
    deliver_due()

    assert sorted(type(ending).__name__ for ending in endings) == [
        "Handled",
        "NoneType",
        "NoneType",
    ]
    assert runs == ["run"]
    assert Note.objects.count() == 1
    assert Delivery.objects.get(pk=delivery_id).claims == 1
