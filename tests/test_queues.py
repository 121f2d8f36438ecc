"""Queues keep slow work apart, and a queue that is gone keeps nothing."""

from typing import Any

import pytest
from django.test import override_settings

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    actors,
    define_workflow,
    handles,
    publish,
    registry,
    relay,
    started_by,
)
from django_workflows.models import Delivery
from tests.models import InvoiceState, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class OrderPlaced(Event):
    pass


class PrintLabel(Command):
    pass


def declare() -> None:
    class Parcels(Workflow[ParcelState], queue="parcels"):
        @started_by(OrderPlaced)
        def start(self, message: OrderPlaced) -> None: ...

    invoices = define_workflow(InvoiceState, queue="invoices")

    @invoices.started_by(OrderPlaced)
    def start(message: OrderPlaced, state: InvoiceState, context: Any) -> None: ...

    @handles(OrderPlaced, queue="slow")
    def slow(message: OrderPlaced, context: HandlerContext) -> None: ...

    @handles(OrderPlaced)
    def plain(message: OrderPlaced, context: HandlerContext) -> None: ...


def taken_from(queue: str) -> list[str]:
    ids = [row.id for row in relay.take(queue, 100)]
    return sorted(Delivery.objects.filter(pk__in=ids).values_list("handler", flat=True))


def test_each_delivery_waits_on_the_queue_of_its_handler_or_workflow() -> None:
    declare()

    publish(OrderPlaced())

    assert {d.handler: d.queue for d in Delivery.objects.all()} == {
        "tests.ParcelState": "parcels",
        "tests.InvoiceState": "invoices",
        "tests.slow": "slow",
        "tests.plain": "default",
    }


def test_a_queue_gives_what_is_on_it_and_nothing_else() -> None:
    declare()
    publish(OrderPlaced())

    taken = {queue: taken_from(queue) for queue in ("slow", "parcels", "invoices", "default")}

    assert taken == {
        "slow": ["tests.slow"],
        "parcels": ["tests.ParcelState"],
        "invoices": ["tests.InvoiceState"],
        "default": ["tests.plain"],
    }


def test_the_registry_knows_every_queue_that_is_declared() -> None:
    declare()

    assert registry.current().queues == {"default", "parcels", "invoices", "slow"}


@override_settings(DJANGO_WORKFLOWS={"QUEUE": "ours"})
def test_the_default_queue_is_a_setting() -> None:
    declare()

    publish(OrderPlaced())

    assert Delivery.objects.get(handler="tests.plain").queue == "ours"


def test_rows_on_a_queue_that_nothing_declares_any_more_are_taken_as_orphans() -> None:
    declare()
    publish(OrderPlaced())
    Delivery.objects.filter(handler="tests.slow").update(queue="renamed since")

    taken = [taken_from(queue) for queue in sorted(registry.current().queues)]
    orphans = relay.take("default", 100, orphans=True)

    assert ["tests.slow"] not in taken
    assert [row.id for row in orphans] == [Delivery.objects.get(queue="renamed since").pk]


def test_an_orphan_is_handed_over_on_the_default_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[tuple[str, int]] = []

    class Recorder:
        hands_over = True

        def hand_over(self, queue: str, ids: Any) -> None:
            handed_over.append((queue, len(ids)))

    declare()
    publish(OrderPlaced())
    Delivery.objects.filter(handler="tests.slow").update(queue="renamed since")
    monkeypatch.setattr("django_workflows.outbox.transport", Recorder())

    count = relay.relay_once(orphans=True)

    assert count == 4
    assert sorted(handed_over) == [("default", 1), ("default", 1), ("invoices", 1), ("parcels", 1)]


def test_an_idle_consumer_of_the_default_queue_takes_orphans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare()
    publish(OrderPlaced())
    Delivery.objects.filter(handler="tests.slow").update(queue="renamed since")
    monkeypatch.setattr(actors, "_next_orphans", 0.0)

    busy = actors.take("default", 10)
    idle = actors.take("default", 10)
    soon_after = actors.take("default", 10)

    assert busy == [Delivery.objects.get(handler="tests.plain").pk]
    assert idle == [Delivery.objects.get(handler="tests.slow").pk]
    assert soon_after == []
