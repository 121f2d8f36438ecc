"""Signals: sent after the commit, by whoever did the work; a receiver changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.dispatch import Signal
from django.test import override_settings

from django_workflows import (
    Event,
    HandlerContext,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
    relay,
    signals,
)
from django_workflows.dispatch import claim
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

SIGNALS = {
    "started": signals.workflow_started,
    "completed": signals.workflow_completed,
    "handled": signals.delivery_handled,
    "failed": signals.delivery_failed,
}


class ParcelPosted(Event):
    number: int = 1


class ParcelArrived(Event):
    number: int = 1


class ParcelLost(Event):
    pass


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """What every signal has sent: its name, the sender, the rest."""
    heard: list[tuple[str, Any, dict[str, Any]]] = []

    def receiver_of(name: str) -> Any:
        def receive(sender: Any, signal: Signal, **facts: Any) -> None:
            heard.append((name, sender, {**facts, "in_transaction": connection.in_atomic_block}))

        return receive

    receivers = {name: receiver_of(name) for name in SIGNALS}
    for name, signal in SIGNALS.items():
        signal.connect(receivers[name])
    yield heard
    for name, signal in SIGNALS.items():
        signal.disconnect(receivers[name])


@contextmanager
def connected(signal: Signal, receiver: Any) -> Iterator[None]:
    signal.connect(receiver)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def declare() -> Any:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: WorkflowContext[Any]) -> None:
        state.number = message.number

    @workflow.when(ParcelArrived, lookup="number")
    def arrive(message: ParcelArrived, state: ParcelState, context: WorkflowContext[Any]) -> None:
        context.complete()

    @handles(ParcelLost)
    def search(message: ParcelLost, context: HandlerContext) -> None:
        raise ValueError("not found")

    return search


def test_a_workflow_that_starts_and_completes_is_announced(heard: Any) -> None:
    declare()

    publish(ParcelPosted())
    deliver_due()
    publish(ParcelArrived())
    deliver_due()

    assert [(name, sender) for name, sender, _facts in heard] == [
        ("started", ParcelState),
        ("handled", ParcelState),
        ("handled", ParcelState),
        ("completed", ParcelState),
    ]
    state = ParcelState.objects.get()
    assert {facts["instance"].pk for _name, _sender, facts in heard} == {state.pk}
    assert [facts["instance"].version for _n, _s, facts in heard] == [1, 1, 2, 2]
    assert {facts["delivery"].status for _n, _s, facts in heard} == {Status.HANDLED}


def test_signals_are_sent_after_the_commit(heard: Any) -> None:
    declare()

    publish(ParcelPosted())
    deliver_due()

    assert [facts["in_transaction"] for _n, _s, facts in heard] == [False, False]


@override_settings(DJANGO_WORKFLOWS={"ATTEMPTS": 2, "BACKOFF": timedelta(0)})
def test_a_delivery_that_failed_for_good_is_announced_once_with_its_error(heard: Any) -> None:
    handler = declare()

    publish(ParcelLost())
    deliver_due()

    [(name, sender, facts)] = heard
    assert (name, sender) == ("failed", handler)
    assert (str(facts["error"]), facts["delivery"].pk) == ("not found", delivery_of(ParcelLost).pk)
    assert facts["delivery"].status == Status.FAILED


@override_settings(DJANGO_WORKFLOWS={"LOSSES": 1, "LEASE": timedelta(0)})
def test_a_delivery_that_cost_too_many_workers_is_announced(heard: Any) -> None:
    handler = declare()
    publish(ParcelLost())
    claim(delivery_of(ParcelLost).pk)  # and its worker dies

    relay.take("default", 10)

    [(name, sender, facts)] = heard
    assert (name, sender, facts["error"]) == ("failed", handler, None)
    assert facts["delivery"].reason == "Its worker died 1 times."


def test_what_was_ignored_is_not_announced(heard: Any) -> None:
    declare()

    publish(ParcelArrived())
    deliver_due()

    assert heard == []


@pytest.mark.parametrize("name", ["started", "handled"])
def test_a_receiver_that_raises_changes_nothing(name: str, heard: Any) -> None:
    declare()

    def receiver(**facts: Any) -> None:
        raise ValueError("the receiver is broken")

    with connected(SIGNALS[name], receiver):
        publish(ParcelPosted())
        deliver_due()

    delivery = delivery_of(ParcelPosted)
    assert (delivery.status, delivery.attempts, delivery.error) == (Status.HANDLED, 0, "")
    assert ParcelState.objects.count() == 1
    assert [name for name, _sender, _facts in heard] == ["started", "handled"]


def test_a_receiver_that_raises_leaves_a_failed_delivery_failed() -> None:
    declare()

    def receiver(**facts: Any) -> None:
        raise ValueError("the receiver is broken")

    with (
        connected(signals.delivery_failed, receiver),
        override_settings(DJANGO_WORKFLOWS={"ATTEMPTS": 1}),
    ):
        publish(ParcelLost())
        deliver_due()

    delivery = delivery_of(ParcelLost)
    assert (delivery.status, delivery.error) == (Status.FAILED, "ValueError: not found")


def test_a_receiver_may_publish() -> None:
    """It is in no handler's context and in no transaction: it leaves at once."""
    declare()

    def receiver(**facts: Any) -> None:
        publish(ParcelArrived())

    with connected(signals.workflow_started, receiver):
        publish(ParcelPosted())
        deliver_due()

    assert ParcelState.objects.get().lifecycle == "completed"
    assert Delivery.objects.filter(status=Status.HANDLED).count() == 2
