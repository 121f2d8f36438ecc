"""What a handler changes and what it sends: both are committed, or neither is."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    dispatch,
    handles,
    publish,
    send,
    started_by,
    when,
)
from django_workflows.models import Delivery, Status
from tests.concurrency import at_once
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import Note, TallyState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class TallyOpened(Event):
    key: str


class Counted(Event):
    key: str
    by: int = 1


class WriteNote(Command):
    text: str


class MoveCount(Command):
    source: str
    target: str


@pytest.fixture(autouse=True)
def _notes_are_written(own_registry: None) -> None:
    @handles(WriteNote)
    def write_note(message: WriteNote, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


@pytest.fixture
def retries_at_once(settings: Any) -> None:
    """Failed attempts are due again without a wait."""
    settings.DJANGO_WORKFLOWS = {"BACKOFF": timedelta(0)}


def notes() -> list[str]:
    return sorted(Note.objects.values_list("text", flat=True))


# B9
def test_nothing_leaves_when_the_state_of_the_step_cannot_be_saved() -> None:
    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None: ...

        @when(Counted, lookup="key")
        def count(self, message: Counted) -> None:
            self.send(WriteNote(text="sent"))
            self.state.total = -1  # refused by the table: the field is a positive integer

    publish(TallyOpened(key="k"))
    deliver_due()
    publish(Counted(key="k"))
    deliver_due()

    counted = delivery_of(Counted)
    assert statuses_of(WriteNote) == []
    assert list(TallyState.objects.values_list("total", "version")) == [(0, 1)]
    assert (counted.status, counted.attempts) == (Status.PENDING, 1)
    assert "IntegrityError" in counted.error


# B9
def test_nothing_leaves_when_the_first_state_cannot_be_inserted() -> None:
    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None:
            self.send(WriteNote(text="sent"))
            self.state.total = -1

    publish(TallyOpened(key="k"))
    deliver_due()

    assert statuses_of(WriteNote) == []
    assert not TallyState.objects.exists()
    assert delivery_of(TallyOpened).status == Status.PENDING


# B10
@pytest.mark.usefixtures("retries_at_once")
def test_the_failure_of_one_handler_does_not_repeat_the_work_of_another() -> None:
    attempts: list[str] = []

    @handles(Counted)
    def steady(message: Counted, context: HandlerContext) -> None:
        attempts.append("steady")
        Note.objects.create(text="steady worked")
        context.send(WriteNote(text="steady sent"))

    @handles(Counted)
    def shaky(message: Counted, context: HandlerContext) -> None:
        attempts.append("shaky")
        Note.objects.create(text="shaky worked")
        context.send(WriteNote(text="shaky sent"))
        if context.attempt < 3:
            raise RuntimeError("not yet")

    publish(Counted(key="k"))
    deliver_due()

    assert attempts.count("steady") == 1
    assert attempts.count("shaky") == 3
    assert notes() == ["shaky sent", "shaky worked", "steady sent", "steady worked"]
    assert delivery_of(Counted, handler="tests.steady").attempts == 0
    assert delivery_of(Counted, handler="tests.shaky").attempts == 2


# B11
@pytest.mark.parametrize("verb", ["the context's", "the module's"])
def test_what_a_handler_sends_in_a_block_that_is_rolled_back_does_not_leave(verb: str) -> None:
    @handles(Counted)
    def count(message: Counted, context: HandlerContext) -> None:
        send_one = context.send if verb == "the context's" else send
        send_one(WriteNote(text="before"))
        try:
            with transaction.atomic():
                send_one(WriteNote(text="inside"))
                raise RuntimeError("this block only")
        except RuntimeError:
            send_one(WriteNote(text="after"))

    publish(Counted(key="k"))
    deliver_due()

    assert notes() == ["after", "before"]
    assert statuses_of(WriteNote) == [Status.HANDLED] * 2


# B11
def test_what_a_step_sends_in_a_block_that_is_rolled_back_does_not_leave() -> None:
    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None:
            with transaction.atomic():
                self.send(WriteNote(text="kept"))
                try:
                    with transaction.atomic():
                        self.send(WriteNote(text="inside"))
                        raise RuntimeError("this block only")
                except RuntimeError:
                    pass

    publish(TallyOpened(key="k"))
    deliver_due()

    assert notes() == ["kept"]
    assert TallyState.objects.count() == 1


# B11
def test_what_is_sent_outside_a_handler_in_a_block_that_is_rolled_back_does_not_leave() -> None:
    with transaction.atomic():
        send(WriteNote(text="outside"))
        with suppress(RuntimeError), transaction.atomic():
            send(WriteNote(text="inside"))
            raise RuntimeError("this block only")
    deliver_due()

    assert notes() == ["outside"]


# B14
def test_an_event_that_one_subscriber_has_handled_still_reaches_the_others() -> None:
    reached: list[str] = []

    @handles(TallyOpened)
    def first(message: TallyOpened, context: HandlerContext) -> None:
        reached.append("first")

    @handles(TallyOpened)
    def second(message: TallyOpened, context: HandlerContext) -> None:
        reached.append("second")

    class Tally(Workflow[TallyState]):
        @started_by(TallyOpened, once_per="key")
        def open(self, message: TallyOpened) -> None:
            reached.append("workflow")

    [message_id] = publish(TallyOpened(key="k"))
    deliver_due()

    assert sorted(reached) == ["first", "second", "workflow"]
    deliveries = Delivery.objects.filter(message_id=message_id)
    assert [delivery.status for delivery in deliveries] == [Status.HANDLED] * 3


def counts_are_moved(failing_attempts: int = 0, meanwhile: Any = None) -> None:
    @handles(MoveCount)
    def move_count(message: MoveCount, context: HandlerContext) -> None:
        source = TallyState.objects.get(key=message.source)
        target = TallyState.objects.get(key=message.target)
        source.total -= 1
        source.save()
        if meanwhile:
            meanwhile()
        target.total += 1
        target.save()
        if context.attempt <= failing_attempts:
            raise RuntimeError("after both")


def totals() -> dict[str, int]:
    return dict(TallyState.objects.values_list("key", "total"))


# B15
@pytest.mark.usefixtures("retries_at_once")
def test_a_handler_that_fails_changes_none_of_several_states_and_then_all() -> None:
    TallyState.objects.create(key="a", total=5)
    TallyState.objects.create(key="b", total=0)
    counts_are_moved(failing_attempts=2)
    send(MoveCount(source="a", target="b"))

    dispatch.deliver(delivery_of(MoveCount).pk)
    after_failure = totals()
    deliver_due()

    assert after_failure == {"a": 5, "b": 0}
    assert totals() == {"a": 4, "b": 1}
    assert delivery_of(MoveCount).attempts == 2


# B15
@pytest.mark.postgres  # on SQLite nobody else can write meanwhile
def test_a_handler_overtaken_at_its_second_state_runs_again_on_both() -> None:
    TallyState.objects.create(key="a", total=5)
    TallyState.objects.create(key="b", total=0)
    overtakings = iter([lambda: TallyState.objects.filter(key="b").update(total=10)])

    def meanwhile() -> None:
        for overtake in overtakings:
            at_once(overtake)

    counts_are_moved(meanwhile=meanwhile)
    send(MoveCount(source="a", target="b"))
    deliver_due()

    assert totals() == {"a": 4, "b": 11}
    assert (delivery_of(MoveCount).attempts, delivery_of(MoveCount).conflicts) == (0, 1)
