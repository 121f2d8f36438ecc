"""A real broker that is down, or does not answer, when a transaction commits."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from django.utils.module_loading import import_string
from dramatiq import Broker

from django_workflows import (
    Event,
    HandlerContext,
    actors,
    dispatch,
    handles,
    outbox,
    publish,
    relay,
)
from django_workflows.broker import dramatiq_settings
from django_workflows.models import Delivery
from tests.concurrency import wait_until
from tests.gate import Gate
from tests.models import Note
from tests.racing import Background

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class NoteSuggested(Event):
    text: str


@pytest.fixture(autouse=True)
def _notes_are_written(own_registry: None, settings: Any) -> None:
    settings.DJANGO_WORKFLOWS = {
        "LEASE": timedelta(seconds=2),
        "RELAY_EVERY": timedelta(seconds=0.1),
    }

    @handles(NoteSuggested)
    def write_note(message: NoteSuggested, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


@pytest.fixture(params=["redis", "rabbitmq"])
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    """A shut gate before a real broker."""
    gate = Gate(request.getfixturevalue(f"{request.param}_url"))
    yield gate
    gate.shut()


@pytest.fixture
def broker(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """The project's broker, as BROKER_URL would make it."""
    made = dramatiq_settings(gate.url)
    broker = import_string(made["BROKER"])(middleware=[], **made["OPTIONS"])
    broker.declare_queue("default")
    monkeypatch.setattr(outbox, "transport", actors.DramatiqTransport(broker))
    monkeypatch.setattr(actors, "BROKER_PAUSE", 2.0)
    yield broker
    broker.close()


def deliver_arriving(broker: Broker, done: Callable[[], bool]) -> None:
    """Deliver what the broker brings until this is true."""
    consumer = broker.consume("default", prefetch=10, timeout=100)
    try:

        def deliver_next() -> bool:
            if (message := next(consumer)) is not None:
                dispatch.deliver(UUID(message.args[0]))
                consumer.ack(message)
            return done()

        wait_until(deliver_next, timeout=30, every=0)
    finally:
        consumer.close()


def suggest_note(text: str) -> float:
    """How many seconds the caller waited, who did something in the same transaction."""
    started = time.monotonic()
    with transaction.atomic():
        Note.objects.create(text=f"the caller's, with {text}")
        publish(NoteSuggested(text=text))
    return time.monotonic() - started


def is_written(*texts: str) -> bool:
    return bool(Note.objects.filter(text__in=texts).count() == len(texts))


# B16
@pytest.mark.parametrize("was_up", [False, True], ids=["never was up", "went down"])
def test_a_broker_that_is_down_at_the_commit_gets_the_messages_when_it_is_back(
    gate: Gate, broker: Broker, was_up: bool
) -> None:
    if was_up:
        gate.open()
        suggest_note("before")
        deliver_arriving(broker, lambda: is_written("before"))
        gate.shut()

    waited = [suggest_note("first"), suggest_note("second")]
    written_meanwhile = Note.objects.filter(text__in=["first", "second"]).count()
    gate.open()
    with Background(relay.run):
        deliver_arriving(broker, lambda: is_written("first", "second"))

    assert max(waited) < 3
    assert written_meanwhile == 0
    assert is_written("the caller's, with first", "the caller's, with second")
    assert set(Delivery.objects.values_list("status", "claims")) == {("handled", 1)}


# B16
def test_a_broker_that_does_not_answer_holds_one_commit_up_for_a_few_seconds(
    gate: Gate, broker: Broker
) -> None:
    gate.hold()

    first, second = suggest_note("first"), suggest_note("second")

    assert first < 10
    assert second < 1
    assert is_written("the caller's, with first", "the caller's, with second")
