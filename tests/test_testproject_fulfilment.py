"""The order fulfilment of testproject, tested as its users would test it, in both styles."""

import uuid
from datetime import timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any

import pytest

from django_workflows.models import Delivery
from django_workflows.testing import Scenario, record
from testproject.variants import VARIANTS, Variant

ORDER = uuid.UUID("01a22e00-0000-7000-8000-000000000001")
AMOUNT = Decimal("19.90")


@pytest.fixture(params=VARIANTS.values(), ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _outside_services_that_work(settings: Any) -> None:
    settings.PAYMENT_DECLINE_RATE = settings.PAYMENT_FLAKY_RATE = 0.0
    settings.SHIPMENT_FAIL_RATE = 0.0


# Step by step, without a database


def placed(variant: Variant, amount: Decimal = AMOUNT) -> Scenario:
    scenario = Scenario(variant.fulfilment)
    scenario.when(variant.messages.OrderPlaced(order_id=ORDER, amount=amount))
    return scenario


def test_an_order_asks_for_its_payment_and_waits_a_day(variant: Variant) -> None:
    messages = variant.messages

    scenario = placed(variant)

    payment = messages.TakePayment(order_id=ORDER, amount=AMOUNT)
    assert scenario.then.sent == [payment, messages.PaymentOverdue()]
    assert scenario.then.delays[messages.PaymentOverdue] == timedelta(days=1)
    assert scenario.state is not None
    assert scenario.state.order_id == ORDER


def test_an_order_goes_from_payment_to_receipt(variant: Variant) -> None:
    messages, scenario = variant.messages, placed(variant)

    sent = [
        scenario.when(answer(order_id=ORDER)).sent
        for answer in (
            messages.PaymentTaken,
            messages.StockPicked,
            messages.OrderShipped,
            messages.ReceiptSent,
        )
    ]

    assert sent == [
        [messages.PickStock(order_id=ORDER)],
        [messages.ShipOrder(order_id=ORDER)],
        [messages.SendReceipt(order_id=ORDER)],
        [],
    ]
    assert (scenario.state.status, scenario.lifecycle) == ("completed", "completed")


def test_an_order_that_nobody_pays_is_declined_after_a_day(variant: Variant) -> None:
    scenario = placed(variant)

    scenario.advance(timedelta(days=1))

    assert (scenario.state.status, scenario.lifecycle) == ("declined", "completed")
    assert scenario.state.declined_because == "payment overdue"


def test_a_paid_order_is_never_overdue(variant: Variant) -> None:
    scenario = placed(variant)
    scenario.when(variant.messages.PaymentTaken(order_id=ORDER))

    delivered = scenario.advance(timedelta(days=3))

    assert delivered == []
    assert scenario.state.status == "paid"


def test_an_order_whose_payment_is_declined_ends(variant: Variant) -> None:
    scenario = placed(variant)

    scenario.when(variant.messages.PaymentDeclined(order_id=ORDER, reason="no funds"))

    assert (scenario.state.status, scenario.lifecycle) == ("declined", "completed")
    assert scenario.state.declined_because == "no funds"


def test_what_was_paid_and_picked_is_noted_to_be_undone(variant: Variant) -> None:
    messages, scenario = variant.messages, placed(variant)
    scenario.when(messages.PaymentTaken(order_id=ORDER))

    then = scenario.when(messages.StockPicked(order_id=ORDER))

    assert then.noted == [
        messages.PutStockBack(order_id=ORDER),
        messages.RefundPayment(order_id=ORDER, amount=AMOUNT),
    ]


def test_a_large_order_is_paid_for_once_its_credit_was_checked(variant: Variant) -> None:
    messages, amount = variant.messages, Decimal("1000.01")

    scenario = placed(variant, amount)
    asked = scenario.then.sent
    then = scenario.when(messages.CreditChecked(approved=True))

    assert asked == [messages.CheckCredit(order_id=ORDER, amount=amount)]
    assert then.sent[0] == messages.TakePayment(order_id=ORDER, amount=amount)


def test_a_large_order_without_credit_is_declined(variant: Variant) -> None:
    scenario = placed(variant, Decimal(5000))

    then = scenario.when(variant.messages.CreditChecked(approved=False, reason="too much"))

    assert then.sent == []
    assert (scenario.state.status, scenario.lifecycle) == ("declined", "completed")
    assert scenario.state.declined_because == "too much"


# The handlers, called


@pytest.mark.django_db
def test_a_payment_is_stored_and_answered(variant: Variant) -> None:
    messages, called = variant.messages, record()

    variant.handlers.take_payment(
        messages.TakePayment(order_id=ORDER, amount=AMOUNT), called.context
    )

    assert variant.rows["payments"].objects.get(order_id=ORDER).amount == AMOUNT
    assert called.replied == [messages.PaymentTaken(order_id=ORDER)]


@pytest.mark.django_db
def test_a_declined_payment_is_not_stored(variant: Variant, settings: Any) -> None:
    settings.PAYMENT_DECLINE_RATE = 1.0
    messages, called = variant.messages, record()

    variant.handlers.take_payment(
        messages.TakePayment(order_id=ORDER, amount=AMOUNT), called.context
    )

    assert not variant.rows["payments"].objects.exists()
    assert called.replied == [
        messages.PaymentDeclined(order_id=ORDER, reason="declined by provider")
    ]


# The whole of it, on the real tables


def counts(variant: Variant) -> dict[str, int]:
    return {name: model.objects.count() for name, model in variant.rows.items()}


def ended(variant: Variant) -> tuple[str, str]:
    instance = variant.state.objects.get()
    return instance.status, instance.lifecycle


def test_an_order_is_fulfilled(variant: Variant, workflows: ModuleType) -> None:
    variant.place_order()

    workflows.run_until_idle()

    assert ended(variant) == ("completed", "completed")
    assert counts(variant) == {
        "payments": 1,
        "picks": 1,
        "shipments": 1,
        "receipts": 1,
        "refunds": 0,
        "restocks": 0,
    }
    assert workflows.failed() == []


def test_a_provider_that_breaks_down_is_asked_again(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    settings.PAYMENT_FLAKY_RATE = 1.0
    variant.place_order()
    workflows.run_until_idle()
    waits = workflows.failed()

    settings.PAYMENT_FLAKY_RATE = 0.0
    workflows.advance(timedelta(seconds=1))

    assert ["ProviderError" in delivery.error for delivery in waits] == [True]
    assert ended(variant) == ("completed", "completed")


def test_an_order_that_nobody_can_deliver_is_refunded_and_restocked(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    settings.SHIPMENT_FAIL_RATE = 1.0
    order = variant.place_order()

    workflows.run_until_idle()

    messages = variant.messages
    assert ended(variant) == ("not shipped", "compensated")
    assert counts(variant) == {
        "payments": 1,
        "picks": 1,
        "shipments": 0,
        "receipts": 0,
        "refunds": 1,
        "restocks": 1,
    }
    assert list(
        Delivery.objects.filter(undoes=True, status="handled")
        .order_by("ended_at")
        .values_list("message_name", flat=True)
    ) == [messages.RefundPayment.stored_name(), messages.PutStockBack.stored_name()]
    [refund] = workflows.sent(messages.RefundPayment)
    assert refund == messages.RefundPayment(order_id=order.pk, amount=AMOUNT)


def test_a_refusal_of_the_carrier_is_not_tried_again(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    settings.SHIPMENT_FAIL_RATE = 1.0
    variant.place_order()

    workflows.run_until_idle()

    [refused] = workflows.failed()
    assert (refused.status, refused.attempts) == ("failed", 1)
    assert "Undeliverable" in refused.error


def test_a_refund_that_fails_stops_the_undoing_until_it_is_replayed(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    settings.SHIPMENT_FAIL_RATE = 1.0
    settings.DJANGO_WORKFLOWS = {"ATTEMPTS": 2}
    order = variant.place_order()
    in_the_way = variant.rows["refunds"].objects.create(order_id=order.pk, amount=1)
    workflows.run_until_idle()
    workflows.advance(timedelta(hours=1))
    stopped = (ended(variant)[1], variant.rows["restocks"].objects.count())

    in_the_way.delete()
    Delivery.objects.filter(undoes=True).replay()
    workflows.run_until_idle()

    assert stopped == ("failed", 0)
    assert ended(variant) == ("not shipped", "compensated")
    assert variant.rows["restocks"].objects.count() == 1


def test_an_order_placed_twice_is_one_order(variant: Variant, workflows: ModuleType) -> None:
    variant.place_order(ORDER)
    variant.place_order(ORDER)

    workflows.run_until_idle()

    assert counts(variant)["payments"] == 1
    assert variant.order.objects.count() == variant.state.objects.count() == 1
