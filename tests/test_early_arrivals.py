"""`if_missing="wait"`: a message that comes before its instance is parked until there is one."""

import threading
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection

from django_workflows import (
    Event,
    Workflow,
    attribute,
    define_workflow,
    publish,
    started_by,
    wait,
    when,
)
from django_workflows.dispatch import deliver
from django_workflows.endings import Handled
from django_workflows.models import Delivery, Status
from django_workflows.relay import take
from tests.concurrency import at_once, wait_until
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import InvoiceState, ParcelState

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("isolated_registry"),
]

HOUR = timedelta(hours=1)


class ParcelPosted(Event):
    number: int = 1


class ParcelAddressed(Event):
    number: int
    customer: str


class ParcelScanned(Event):
    number: int | None = 1
    place: str = "depot"


class CustomerRang(Event):
    customer: str


class AnyKey(Event):
    order_id: UUID | None = None
    number: str | None = None
    weight: Decimal | None = None
    posted_on: date | None = None
    insured: bool | None = None


def parcels(if_missing: Any = "wait", in_start: Callable[[Any], None] = lambda w: None) -> None:
    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            in_start(self)

        @when(ParcelAddressed, lookup="number")
        def address(self, message: ParcelAddressed) -> None:
            self.state.customer = message.customer

        @when(ParcelScanned, lookup="number", if_missing=if_missing)
        def scan(self, message: ParcelScanned) -> None:
            self.state.seen.append(message.place)

        @when(CustomerRang, lookup="customer", if_missing=if_missing)
        def ring(self, message: CustomerRang) -> None:
            self.state.seen.append(f"{message.customer} rang")


# Waiting


def test_a_message_before_its_instance_waits_in_its_row_until_the_limit(
    workflows: ModuleType,
) -> None:
    """D31, `if_missing="wait"`."""
    parcels()

    publish(ParcelScanned())
    workflows.run_until_idle()

    waiting = delivery_of(ParcelScanned)
    assert (waiting.status, waiting.attempts, waiting.claims) == (Status.PENDING, 0, 1)
    assert waiting.reason == "It waits for its instance to be created."
    assert waiting.due_at == waiting.relay_at
    waits = waiting.due_at - waiting.created_at
    assert timedelta(days=1) <= waits < timedelta(days=1, minutes=1)


def test_what_waits_is_not_looked_at_before_the_limit(workflows: ModuleType) -> None:
    """No polling: neither the relay nor a worker touches the row."""
    parcels()
    publish(ParcelScanned())
    workflows.run_until_idle()

    workflows.advance(timedelta(hours=23))
    taken = take("default", 100)
    early = deliver(delivery_of(ParcelScanned).pk)

    assert (taken, early) == ([], None)
    assert delivery_of(ParcelScanned).claims == 1


def test_it_is_handled_as_soon_as_its_instance_is_created(workflows: ModuleType) -> None:
    """D31: oldest first, each once."""
    parcels()
    publish(ParcelScanned(place="depot"), ParcelScanned(place="door"))
    workflows.run_until_idle()

    publish(ParcelPosted())
    workflows.run_until_idle()

    assert ParcelState.objects.get().seen == ["depot", "door"]
    assert statuses_of(ParcelScanned) == [Status.HANDLED] * 2
    assert set(Delivery.objects.values_list("waits_for", flat=True)) == {""}


def test_only_what_waits_for_that_key_is_let_go(workflows: ModuleType) -> None:
    parcels()
    publish(ParcelScanned(number=1), ParcelScanned(number=2))
    workflows.run_until_idle()

    publish(ParcelPosted(number=2), ParcelPosted(number=3))
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.PENDING, Status.HANDLED]
    assert ParcelState.objects.get(number=2).seen == ["depot"]


def test_only_what_waits_for_that_workflow_is_let_go(workflows: ModuleType) -> None:
    """C29: the same message waits for each of two, under the same key."""
    for state, starts in ((ParcelState, ParcelPosted), (InvoiceState, ParcelAddressed)):
        workflow = define_workflow(state)
        workflow.started_by(starts)(_takes_the_order)
        workflow.when(AnyKey, lookup="order_id", if_missing="wait")(_notes)
    publish(AnyKey(order_id=_ORDER))
    workflows.run_until_idle()

    publish(ParcelPosted())
    workflows.run_until_idle()

    stands = dict(
        Delivery.objects.filter(message_name="tests.AnyKey").values_list("handler", "status")
    )
    assert stands == {"tests.ParcelState": Status.HANDLED, "tests.InvoiceState": Status.PENDING}


def test_it_is_let_go_by_a_later_step_that_sets_the_field(workflows: ModuleType) -> None:
    parcels()
    publish(CustomerRang(customer="Ann"), ParcelPosted(), ParcelScanned())
    workflows.run_until_idle()
    before = statuses_of(CustomerRang)

    publish(ParcelAddressed(number=1, customer="Ann"))
    workflows.run_until_idle()

    assert before == [Status.PENDING]
    assert ParcelState.objects.get().seen == ["depot", "Ann rang"]


def test_a_start_that_is_discarded_lets_nothing_go(workflows: ModuleType) -> None:
    """D34: there is no instance."""
    parcels(in_start=lambda workflow: workflow.discard())
    publish(ParcelScanned())
    workflows.run_until_idle()

    publish(ParcelPosted())
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.PENDING]


@pytest.mark.parametrize(
    ("field_name", "told", "stored"),
    [
        ("order_id", UUID("00000000-0000-4000-8000-00000000000a"), None),
        ("number", "17", 17),
        ("weight", Decimal("1.5"), Decimal("1.500")),
        ("posted_on", date(2030, 2, 1), None),
        ("insured", False, None),
    ],
)
def test_what_it_waits_for_is_compared_as_the_field_holds_it(
    workflows: ModuleType, field_name: str, told: Any, stored: Any
) -> None:
    """C24."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        setattr(state, field_name, told if stored is None else stored)

    workflow.when(AnyKey, lookup=field_name, maps_to=field_name, if_missing="wait")(_notes)

    publish(AnyKey(**{field_name: told}))
    workflows.run_until_idle()
    before = statuses_of(AnyKey)
    publish(ParcelPosted())
    workflows.run_until_idle()

    assert before == [Status.PENDING]
    assert statuses_of(AnyKey) == [Status.HANDLED]


def test_it_may_wait_for_an_attribute(workflows: ModuleType) -> None:
    """C22."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        state.customer = "Ann"

    workflow.when(ParcelScanned, lookup=attribute("who"), maps_to="customer", if_missing="wait")(
        _notes
    )

    publish(ParcelScanned(), sticky_attributes={"who": "Ann"})
    workflows.run_until_idle()
    publish(ParcelPosted())
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.HANDLED]


# What does not wait


def test_a_message_without_a_key_does_not_wait(workflows: ModuleType) -> None:
    """C23."""
    parcels()

    publish(ParcelScanned(number=None), CustomerRang(customer=""))
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.IGNORED]
    assert statuses_of(CustomerRang) == [Status.IGNORED]


def test_a_message_for_an_instance_that_has_ended_does_not_wait(workflows: ModuleType) -> None:
    """D32."""
    parcels(in_start=lambda workflow: workflow.complete())
    publish(ParcelPosted())
    workflows.run_until_idle()

    publish(ParcelScanned())
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.IGNORED]


def test_a_message_whose_instance_has_ended_by_the_time_it_is_let_go_is_ignored(
    workflows: ModuleType,
) -> None:
    """D32 and D33 together."""
    parcels(in_start=lambda workflow: workflow.complete())
    publish(ParcelScanned())
    workflows.run_until_idle()

    publish(ParcelPosted())
    workflows.run_until_idle()

    assert statuses_of(ParcelScanned) == [Status.IGNORED]
    assert "has ended" in delivery_of(ParcelScanned).reason


# The limit


def test_after_the_limit_it_is_ignored_with_a_reason(
    workflows: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """D31."""
    parcels(if_missing=wait(HOUR))
    publish(ParcelScanned())
    workflows.advance(HOUR - timedelta(minutes=1))
    before = statuses_of(ParcelScanned)

    workflows.advance(timedelta(minutes=2))
    publish(ParcelPosted())
    workflows.run_until_idle()

    late = delivery_of(ParcelScanned)
    assert before == [Status.PENDING]
    assert (late.status, late.attempts) == (Status.IGNORED, 0)
    assert (
        late.reason == "No instance of tests.ParcelState matches tests.ParcelScanned by number 1."
    )
    assert "The message is ignored" in caplog.text


def test_after_the_limit_it_is_failed_where_that_is_declared(workflows: ModuleType) -> None:
    """D31 and H52: visible, and handled by a replay once there is an instance."""
    parcels(if_missing=wait(HOUR, then="fail"))
    publish(ParcelScanned())
    workflows.advance(2 * HOUR)
    late = delivery_of(ParcelScanned)

    publish(ParcelPosted())
    Delivery.objects.filter(pk=late.pk).replay()
    workflows.run_until_idle()

    assert (late.status, late.attempts) == (Status.FAILED, 1)
    assert "Replay the delivery once there is one." in late.error
    assert statuses_of(ParcelScanned) == [Status.HANDLED]


def test_a_replay_after_the_limit_waits_once_more(workflows: ModuleType) -> None:
    parcels(if_missing=wait(HOUR))
    publish(ParcelScanned())
    workflows.advance(2 * HOUR)
    ignored = statuses_of(ParcelScanned)

    Delivery.objects.all().replay()
    workflows.advance(HOUR / 2)
    waiting = statuses_of(ParcelScanned)
    publish(ParcelPosted())
    workflows.run_until_idle()

    assert (ignored, waiting) == ([Status.IGNORED], [Status.PENDING])
    assert ParcelState.objects.get().seen == ["depot"]


def test_what_waits_cannot_be_replayed(workflows: ModuleType) -> None:
    parcels()
    publish(ParcelScanned())
    workflows.run_until_idle()

    count = Delivery.objects.all().replay()

    assert count == 0


# Raced


@pytest.mark.timeout(200)
def test_a_message_raced_with_the_creation_of_its_instance_is_never_lost_and_never_doubled() -> (
    None
):
    parcels()
    rounds = 120 if connection.vendor == "postgresql" else 20

    for number in range(rounds):
        publish(ParcelScanned(number=number), ParcelPosted(number=number))
        scan = delivery_of(ParcelScanned, status=Status.PENDING).pk
        start = delivery_of(ParcelPosted, status=Status.PENDING).pk
        at_once(lambda s=scan: deliver(s), lambda s=start: deliver(s))
        deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {
        number: ["depot"] for number in range(rounds)
    }
    assert set(statuses_of(ParcelScanned)) == {Status.HANDLED}


@pytest.mark.timeout(200)
def test_a_message_raced_with_the_step_that_sets_its_key_is_never_lost_and_never_doubled() -> None:
    parcels()
    rounds = 60 if connection.vendor == "postgresql" else 10

    for number in range(rounds):
        customer = f"customer {number}"
        publish(ParcelPosted(number=number))
        deliver_due()
        publish(CustomerRang(customer=customer), ParcelAddressed(number=number, customer=customer))
        ring = delivery_of(CustomerRang, status=Status.PENDING).pk
        address = delivery_of(ParcelAddressed, status=Status.PENDING).pk
        at_once(lambda r=ring: deliver(r), lambda a=address: deliver(a))
        deliver_due()

    assert dict(ParcelState.objects.values_list("number", "seen")) == {
        number: [f"customer {number} rang"] for number in range(rounds)
    }


@pytest.mark.postgres
def test_a_message_waits_for_a_creation_that_has_not_committed_yet() -> None:
    """The lock on the key: without it the message would park where nobody looks any more."""
    parcels()
    publish(ParcelScanned(), ParcelPosted())
    scan, start = delivery_of(ParcelScanned).pk, delivery_of(ParcelPosted).pk
    created, go_on = threading.Event(), threading.Event()

    def hold_before_the_finish(execute: Any, sql: str, *rest: Any) -> Any:
        if "ended_at = " in sql and "SET status" in sql:
            created.set()
            assert go_on.wait(20)
        return execute(sql, *rest)

    def create() -> Any:
        with connection.execute_wrapper(hold_before_the_finish):
            return deliver(start)

    def let_it_go_on() -> None:
        assert created.wait(20)
        wait_until(_somebody_waits_for_a_key)
        go_on.set()

    def come_early() -> Any:
        assert created.wait(20)
        return deliver(scan)

    _created, arrived, _none = at_once(create, come_early, let_it_go_on)

    assert isinstance(arrived, Handled)
    assert ParcelState.objects.get().seen == ["depot"]


def _somebody_waits_for_a_key() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        return bool(cursor.fetchone()[0])


_ORDER = uuid4()


def _takes_the_order(message: Any, state: Any, context: Any) -> None:
    state.order_id = _ORDER


def _notes(message: Any, state: Any, context: Any) -> None:
    state.seen.append("here")
