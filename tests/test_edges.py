"""The edges of promises: small things that once lost a message, an error or an update."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings
from pydantic import field_validator

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    RetryLater,
    Workflow,
    dispatch,
    handles,
    leases,
    publish,
    registry,
    relay,
    started_by,
    when,
    when_all,
)
from django_workflows.broker import DatabaseBroker
from django_workflows.errors import StaleState
from django_workflows.instances import StateTable, difference
from django_workflows.models import Delivery, Lifecycle, Status
from django_workflows.notices import CommandFailed
from django_workflows.recovery import RetryAfter
from tests.concurrency import at_once
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import Note, ParcelState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]


class ParcelPosted(Event):
    number: int = 7


class ParcelArrived(Event):
    number: int = 7


class ParcelOverdue(Command):
    number: int = 7


class PickedEvent(Event):
    number: int = 7

    @field_validator("number")
    @classmethod
    def refuse(cls, number: int) -> int:
        if number == 13:
            raise RuntimeError("the validator is broken")
        return number


class CalledOff(Exception):
    pass


def parcels(on_arrival: Any) -> None:
    """A workflow whose timeout is found by a lookup; `on_arrival` is what the answer does."""

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(ParcelOverdue(number=message.number), delay=timedelta(hours=1))

        @when(ParcelArrived, lookup="number")
        def arrive(self, message: ParcelArrived) -> None:
            on_arrival(self)

        @when(ParcelOverdue, lookup="number")
        def complain(self, message: ParcelOverdue) -> None:
            self.state.seen.append("overdue")


def post_and_arrive() -> None:
    publish(ParcelPosted())
    deliver_due()
    publish(ParcelArrived())
    deliver_due()


def test_a_timeout_that_a_lookup_would_find_is_cancelled() -> None:
    parcels(lambda workflow: workflow.cancel(ParcelOverdue))

    post_and_arrive()

    assert statuses_of(ParcelOverdue) == [Status.CANCELLED]


def test_a_cancelling_in_a_block_that_is_rolled_back_did_not_happen() -> None:
    def postpone(workflow: Any) -> None:
        with transaction.atomic():
            workflow.send_again(ParcelOverdue(), delay=timedelta(hours=2))
            raise CalledOff

    def try_to(workflow: Any) -> None:
        with pytest.raises(CalledOff):
            postpone(workflow)

    parcels(try_to)

    post_and_arrive()

    assert statuses_of(ParcelOverdue) == [Status.PENDING]


def test_a_cancelling_in_a_block_moves_the_version_on() -> None:
    def give_up_waiting(workflow: Any) -> None:
        with transaction.atomic():
            workflow.cancel(ParcelOverdue)

    parcels(give_up_waiting)

    post_and_arrive()

    assert statuses_of(ParcelOverdue) == [Status.CANCELLED]
    assert ParcelState.objects.get().version == 2


def test_completing_after_compensating_in_one_step_leaves_the_undoing_alone() -> None:
    @handles(ParcelOverdue)
    def undo(message: ParcelOverdue, context: HandlerContext) -> None:
        Note.objects.create(text="undone")

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.compensate_with(ParcelOverdue())
            self.compensate()
            self.complete()

    publish(ParcelPosted())
    deliver_due()

    assert Note.objects.get().text == "undone"
    assert ParcelState.objects.get().lifecycle == Lifecycle.COMPENSATED


def test_a_notice_that_only_another_release_has_a_step_for_is_put_back() -> None:
    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.send(ParcelOverdue())

    class Other(Command):
        pass

    registry.current().workflows[0].steps.append(_on_failure_of(Other))
    registry.current().changed()
    handles(ParcelOverdue)(lambda message, context: context.fail("no"))
    publish(ParcelPosted())
    deliver_due()
    failed = delivery_of(ParcelOverdue)
    notice = CommandFailed(
        command=failed.message_name,
        body=failed.body,
        delivery_id=failed.pk,
        handler=failed.handler,
        error="no",
        attempts=1,
        losses=0,
    )
    Delivery.objects.filter(pk=failed.pk).update(
        message_name=CommandFailed.stored_name(),
        body=notice.model_dump_json(),
        handler=ParcelState._meta.label,
        part=str(failed.sender_instance_id),
        status=Status.PENDING,
        relay_at=failed.due_at,
        ended_at=None,
    )

    dispatch.deliver(failed.pk)

    failed.refresh_from_db()
    assert failed.status == Status.PENDING
    assert "perhaps another release has" in failed.reason


def _on_failure_of(command: type[Command]) -> Any:
    from django_workflows.declarations import Step

    def told(context: Any, command: Any, failure: Any) -> None: ...

    return Step(CommandFailed, told, about=command)


def test_a_validator_that_raises_whatever_it_likes_is_a_failure_that_is_recorded() -> None:
    class Parcels(Workflow[ParcelState]):
        @when(PickedEvent, lookup="number")
        def pick(self, message: PickedEvent) -> None: ...

    publish(PickedEvent())
    Delivery.objects.update(body='{"number": 13}')

    dispatch.deliver(Delivery.objects.get().pk)

    row = Delivery.objects.get()
    assert row.attempts == 1
    assert "the validator is broken" in row.error


@override_settings(DJANGO_WORKFLOWS={"LOSSES": 500, "LEASE": timedelta(0)})
def test_so_many_losses_that_the_backoff_would_be_endless_stop_no_queue() -> None:
    handles(ParcelOverdue)(lambda message, context: None)
    from django_workflows import send

    send(ParcelOverdue())
    row = Delivery.objects.get()
    assert dispatch.claim(row.pk)
    Delivery.objects.update(losses=400)

    relay.take("default", 10)

    row.refresh_from_db()
    assert (row.status, row.losses) == (Status.PENDING, 401)
    assert row.due_at - row.created_at < timedelta(hours=3)


def test_the_lease_of_a_second_claim_in_this_process_outlives_the_first_run() -> None:
    delivery = Delivery(id="01900000-0000-7000-8000-000000000001", claims=1)
    again = Delivery(id=delivery.id, claims=2)

    first, second = leases.held(delivery), leases.held(again)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    kept = leases._held[delivery.id].delivery.claims
    second.__exit__(None, None, None)

    assert kept == 2
    assert delivery.id not in leases._held


def test_a_state_that_was_read_without_its_version_is_not_saved() -> None:
    ParcelState().save()
    parcel = ParcelState.objects.only("number").get()
    parcel.number = 2

    with pytest.raises(StaleState, match=r"without its version.*only\(\)"):
        parcel.save()

    assert ParcelState.objects.get().number is None


@pytest.mark.parametrize("wait", [5, timedelta(seconds=-1), timedelta.max, None])
@pytest.mark.parametrize("ask", [RetryLater, RetryAfter])
def test_a_wait_that_is_none_is_refused_where_it_is_asked_for(ask: Any, wait: Any) -> None:
    with pytest.raises(ValueError, match=r"is no wait. Give a timedelta"):
        ask(wait)


def test_a_number_that_json_has_no_word_for_is_shown_as_text() -> None:
    table = StateTable.of(connection, ParcelState)
    number = [field for field in table.own_fields if field.name == "number"]

    shown = difference(ParcelState(number=float("nan")), {"number": 1}, number)

    assert shown == '{"number": [1, "nan"]}'


def test_names_are_found_from_the_first_moment_on_by_every_thread() -> None:
    handlers = []
    for number in range(200):
        handlers.append(f"tests.handler_{number}")
        handles(ParcelArrived, name=handlers[-1])(lambda message, context: None)
    start = threading.Barrier(8)

    def look_up() -> list[str]:
        start.wait(10)
        return [name for name in handlers if registry.current().recipient(name) is None]

    missed = at_once(*[look_up] * 8)

    assert missed == [[]] * 8


def test_a_consumer_whose_workers_are_all_busy_does_not_spin() -> None:
    broker = DatabaseBroker(middleware=[])
    broker.declare_queue("default")
    looks: list[int] = []
    ids = [Delivery(message_id=None).id for _ in range(4)]
    broker.take = lambda queue, room: ids[:room]
    consumer = broker.consume("default", prefetch=4, timeout=50)
    taken = [next(consumer) for _ in range(4)]
    assert all(taken)

    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert next(consumer) is None
        looks.append(1)

    assert len(looks) <= 11, "a look each time that the wait is over, no more"


def test_two_joins_of_one_message_are_found_by_a_check() -> None:
    from django_workflows.checks.steps import two_steps_for_one_message

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None: ...

        @when_all(ParcelArrived, PickedEvent)
        def both(self, messages: list[Event]) -> None: ...

        @when(ParcelArrived, lookup="number")
        def arrive(self, message: ParcelArrived) -> None: ...

    found = list(two_steps_for_one_message())

    assert [message.id for message in found] == ["django_workflows.E005"]
    assert "both, arrive" in found[0].msg
