"""`once_per`: one instance per business key, ever, whoever is faster."""

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection

from django_workflows import Event, WorkflowContext, define_workflow, publish
from django_workflows.dispatch import deliver
from django_workflows.models import Delivery, Status
from tests.concurrency import at_once
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Step = WorkflowContext[ParcelState]


class OrderPlaced(Event):
    order_id: UUID | None


class OrderShipped(Event):
    key: str


class OrderRung(Event):
    number: int


def starts_once_per_order(meet: Any = None) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(OrderPlaced, once_per="order_id")
    def start(message: OrderPlaced, state: ParcelState, context: Step) -> None:
        if meet:
            meet()
        context.publish(OrderShipped(key=str(state.order_id)))

    @workflow.when(OrderShipped, lookup="key", maps_to="order_id")
    def ship(message: OrderShipped, state: ParcelState, context: Step) -> None:
        state.seen.append("shipped")
        context.complete()


def test_the_key_is_filled_in_before_the_step_runs() -> None:
    """D36, the first message."""
    starts_once_per_order()
    key = uuid4()

    publish(OrderPlaced(order_id=key))
    deliver_due()

    state = ParcelState.objects.get()
    assert (state.order_id, state.seen) == (key, ["shipped"])


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_second_message_with_a_key_starts_nothing_and_says_why(has_ended: bool) -> None:
    """D36: also when the instance has ended meanwhile."""
    starts_once_per_order()
    key = uuid4()
    publish(OrderPlaced(order_id=key))
    if has_ended:
        deliver_due()
    else:
        deliver(delivery_of(OrderPlaced).pk)

    publish(OrderPlaced(order_id=key))
    deliver_due()

    state = ParcelState.objects.get()
    second = Delivery.objects.filter(message_name="tests.OrderPlaced").latest("id")
    assert (second.status, second.attempts, second.instance_id) == (Status.IGNORED, 0, state.pk)
    assert second.reason == f"tests.ParcelState {state.pk} has order_id {key}."
    assert statuses_of(OrderShipped) == [Status.HANDLED]


def test_two_messages_with_a_key_raced_from_two_threads_start_one_instance() -> None:
    """D36, raced: on Postgres both are inside the step at the same moment."""
    barrier = threading.Barrier(2)

    def meet() -> None:
        if connection.vendor == "postgresql":  # SQLite lets one transaction write at a time
            with suppress(threading.BrokenBarrierError):
                barrier.wait(10)

    starts_once_per_order(meet)
    key = uuid4()
    publish(OrderPlaced(order_id=key), OrderPlaced(order_id=key))
    first, second = Delivery.objects.order_by("id").values_list("pk", flat=True)

    at_once(lambda: deliver(first), lambda: deliver(second))

    assert ParcelState.objects.count() == 1
    assert sorted(statuses_of(OrderPlaced)) == [Status.HANDLED, Status.IGNORED]
    assert statuses_of(OrderShipped) == [Status.PENDING]


def test_a_message_without_a_key_fails_at_once() -> None:
    """An instance without its business key could never be found again."""
    starts_once_per_order()

    publish(OrderPlaced(order_id=None))
    deliver_due()

    delivery = delivery_of(OrderPlaced)
    assert (delivery.status, delivery.attempts) == (Status.FAILED, 1)
    assert "order_id" in delivery.error
    assert not ParcelState.objects.exists()


def test_the_key_may_come_from_a_field_of_another_name() -> None:
    """`lookup=` next to `once_per=`."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(OrderShipped, once_per="order_id", lookup="key")
    def start(message: OrderShipped, state: ParcelState, context: Step) -> None: ...

    key = uuid4()
    publish(OrderShipped(key=str(key)), OrderShipped(key=key.hex))
    deliver_due()

    assert ParcelState.objects.get().order_id == key
    assert sorted(statuses_of(OrderShipped)) == [Status.HANDLED, Status.IGNORED]


def test_another_unique_field_that_is_taken_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constraint refused an instance, and there is none with this key: the step is at fault."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(OrderRung)
    def start(message: OrderRung, state: ParcelState, context: Step) -> None:
        state.order_id = taken

    taken = uuid4()
    ParcelState.objects.create(order_id=taken)
    publish(OrderRung(number=1))
    deliver_due()
    before = delivery_of(OrderRung)
    ParcelState.objects.all().delete()
    move_clock_on(monkeypatch, timedelta(minutes=1))
    deliver_due()

    assert (before.status, before.attempts) == (Status.PENDING, 1)
    assert "IntegrityError" in before.error
    assert delivery_of(OrderRung).status == Status.HANDLED


def test_two_start_or_continue_messages_raced_from_two_threads_are_both_seen() -> None:
    """C28 and D36 together: who comes second continues the instance of who was first."""
    workflow = define_workflow(ParcelState)
    barrier = threading.Barrier(2)

    @workflow.started_by(OrderPlaced, once_per="order_id")
    def start(message: OrderPlaced, state: ParcelState, context: Step) -> None:
        if connection.vendor == "postgresql":
            with suppress(threading.BrokenBarrierError):
                barrier.wait(10)
        state.seen.append("started")

    @workflow.when(OrderPlaced, lookup="order_id")
    def go_on(message: OrderPlaced, state: ParcelState, context: Step) -> None:
        state.seen.append("continued")

    key = uuid4()
    publish(OrderPlaced(order_id=key), OrderPlaced(order_id=key))
    first, second = Delivery.objects.order_by("id").values_list("pk", flat=True)
    at_once(lambda: deliver(first), lambda: deliver(second))

    assert ParcelState.objects.get().seen == ["started", "continued"]
    assert statuses_of(OrderPlaced) == [Status.HANDLED] * 2
