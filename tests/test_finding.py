"""Which instance a message reaches: by the id that travels, a field, an attribute, a function."""

from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    attribute,
    define_workflow,
    handles,
    publish,
    send,
    started_by,
    when,
)
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import InvoiceState, ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class ParcelPosted(Event):
    number: int | None = None
    customer: str = ""


class WeighParcel(Command):
    grams: int


class ParcelWeighed(Event):
    grams: int


class ParcelScanned(Event):
    key: Any = None
    customer: str = ""
    number: int | None = None


ORDER = UUID("0190c5a0-0000-7000-8000-000000000001")


def scans_by(lookup: Any, maps_to: str | None = None) -> None:
    """A workflow that continues with `ParcelScanned` by this lookup."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        state.number, state.customer = message.number, message.customer

    @workflow.when(ParcelScanned, lookup=lookup, maps_to=maps_to)
    def note_scan(message: ParcelScanned, state: ParcelState, context: Any) -> None:
        state.seen.append("scanned")


def scanned() -> set[UUID]:
    """The ids of the instances that saw the scan."""
    return {state.pk for state in ParcelState.objects.all() if "scanned" in state.seen}


def test_an_answer_without_a_lookup_reaches_the_instance_that_sent_the_command() -> None:
    """C20."""

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def weigh(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(WeighParcel(grams=message.number or 0))

        @when(ParcelWeighed)
        def note_weight(self, message: ParcelWeighed) -> None:
            self.state.seen.append(message.grams)

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        context.publish(ParcelWeighed(grams=message.grams))

    publish(*(ParcelPosted(number=number) for number in (1, 2, 3)))
    deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {1: [1], 2: [2], 3: [3]}


def test_a_field_of_the_message_finds_the_instance() -> None:
    """C22, by a field."""
    scans_by("number")
    wanted = ParcelState.objects.create(number=1)
    ParcelState.objects.create(number=2)

    publish(ParcelScanned(number=1))
    deliver_due()

    assert scanned() == {wanted.pk}


def test_a_field_of_the_message_finds_a_state_field_of_another_name() -> None:
    """C22, by a field with `maps_to`."""
    scans_by("key", maps_to="number")
    wanted = ParcelState.objects.create(number=1)
    ParcelState.objects.create(number=2)

    publish(ParcelScanned(key=1, number=2))
    deliver_due()

    assert scanned() == {wanted.pk}


@pytest.mark.parametrize("kind", ["attributes", "sticky_attributes"])
def test_an_attribute_finds_the_instance(kind: str) -> None:
    """C22, by an attribute."""
    scans_by(attribute("tenant"), maps_to="customer")
    wanted = ParcelState.objects.create(customer="acme")
    ParcelState.objects.create(customer="other")

    publish(ParcelScanned(), **{kind: {"tenant": "acme"}})  # type: ignore[misc]
    deliver_due()

    assert scanned() == {wanted.pk}


def test_an_expression_of_several_fields_finds_the_instance() -> None:
    """C22, by an expression."""
    scans_by(lambda message: f"{message.customer}-{message.number}", maps_to="customer")
    wanted = ParcelState.objects.create(customer="acme-7")
    ParcelState.objects.create(customer="acme-8")

    publish(ParcelScanned(customer="acme", number=7))
    deliver_due()

    assert scanned() == {wanted.pk}


@pytest.mark.parametrize(("maps_to", "key"), [("number", None), ("customer", "")])
def test_an_empty_lookup_matches_nothing(maps_to: str, key: Any) -> None:
    """C23: rows that hold NULL or '' are there, and stay untouched."""
    scans_by("key", maps_to=maps_to)
    ParcelState.objects.create(number=None, customer="")

    publish(ParcelScanned(key=key))
    deliver_due()

    assert scanned() == set()
    delivery = delivery_of(ParcelScanned)
    assert (delivery.status, delivery.attempts) == (Status.IGNORED, 0)


@pytest.mark.parametrize("key", [False, 0])
def test_a_lookup_that_is_false_is_not_empty(key: Any) -> None:
    """C23's other side: False and 0 are values."""
    maps_to = "insured" if key is False else "number"
    scans_by("key", maps_to=maps_to)
    wanted = ParcelState.objects.create(**{maps_to: key})

    publish(ParcelScanned(key=key))
    deliver_due()

    assert scanned() == {wanted.pk}


@pytest.mark.parametrize(
    ("maps_to", "key", "other"),
    [
        ("order_id", ORDER, uuid4()),
        ("number", 42, 43),
        ("insured", True, False),
        ("customer", "Zoë 東京", "Zoe"),
        ("posted_on", date(2026, 2, 28), date(2026, 3, 1)),
        ("weight", Decimal("1.250"), Decimal("1.251")),
    ],
)
def test_a_key_of_each_type_finds_its_instance(maps_to: str, key: Any, other: Any) -> None:
    """C24, keys round-trip: as the type itself through a function, and as JSON holds it."""
    scans_by(lambda message: key if message.key is None else message.key, maps_to=maps_to)
    wanted = ParcelState.objects.create(**{maps_to: key})
    ParcelState.objects.create(**{maps_to: other})

    publish(ParcelScanned(), ParcelScanned(key=key if isinstance(key, bool | int) else str(key)))
    deliver_due()

    wanted.refresh_from_db()
    assert wanted.seen == ["scanned", "scanned"]
    assert scanned() == {wanted.pk}


@pytest.mark.parametrize(
    ("maps_to", "key", "type_name"),
    [
        ("order_id", "no-uuid", "UUIDField"),
        ("number", "twelve", "IntegerField"),
        ("number", 2**80, "IntegerField"),
        ("insured", "maybe", "BooleanField"),
        ("posted_on", "2026-02-30", "DateField"),
        ("weight", "heavy", "DecimalField"),
        ("customer", "long" * 100, "CharField"),
    ],
)
def test_a_key_that_the_field_cannot_hold_fails_the_delivery(
    maps_to: str, key: Any, type_name: str
) -> None:
    """C24, the wrong type."""
    scans_by("key", maps_to=maps_to)

    publish(ParcelScanned(key=key))
    deliver_due()

    delivery = delivery_of(ParcelScanned)
    assert (delivery.status, delivery.attempts) == (Status.FAILED, 1)
    assert f"tests.ParcelState.{maps_to}" in delivery.error
    assert type_name in delivery.error
    assert repr(key)[:100] in delivery.error


def test_an_explicit_lookup_wins_over_the_id_that_travelled() -> None:
    """C26."""
    scans_by("number")

    @handles(WeighParcel)
    def scan(message: WeighParcel, context: HandlerContext) -> None:
        context.publish(ParcelScanned(number=message.grams))

    sender = ParcelState.objects.create(number=1)
    wanted = ParcelState.objects.create(number=2)
    send_with_workflow_ids(WeighParcel(grams=2), {"tests.ParcelState": str(sender.pk)})
    deliver_due()

    assert delivery_of(ParcelScanned).workflow_ids == {"tests.ParcelState": str(sender.pk)}
    assert scanned() == {wanted.pk}


def test_the_id_of_another_workflow_is_never_used() -> None:
    """C27: not even when this workflow has an instance of the very same id."""
    workflow = define_workflow(InvoiceState)

    @workflow.when(ParcelWeighed)
    def note(message: ParcelWeighed, state: InvoiceState, context: Any) -> None:
        state.seen.append(message.grams)

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        context.publish(ParcelWeighed(grams=message.grams))

    invoice = InvoiceState.objects.create()
    send_with_workflow_ids(WeighParcel(grams=2), {"tests.ParcelState": str(invoice.pk)})
    deliver_due()

    invoice.refresh_from_db()
    assert invoice.seen == []
    assert delivery_of(ParcelWeighed).status == Status.IGNORED


def send_with_workflow_ids(command: Command, workflow_ids: dict[str, str]) -> None:
    """Send it as if these instances had been on its way."""
    send(command)
    Delivery.objects.filter(message_name=type(command).stored_name()).update(
        workflow_ids=workflow_ids
    )


def test_an_ended_instance_is_not_among_several_that_match() -> None:
    """Only instances that still handle messages get a copy."""
    scans_by("number")
    first, second = (ParcelState.objects.create(number=1) for _ in range(2))
    ParcelState.objects.create(number=1, lifecycle="completed", ended_at=first.started_at)

    publish(ParcelScanned(number=1))
    deliver_due()

    assert scanned() == {first.pk, second.pk}
