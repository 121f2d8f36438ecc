"""The credit check of testproject, a child workflow, tested as its users would, in both styles."""

import uuid
from datetime import timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any

import pytest

from django_workflows.testing import Scenario
from testproject.variants import VARIANTS, Variant

ORDER = uuid.UUID("01a22e00-0000-7000-8000-000000000001")
LARGE = Decimal(2500)


@pytest.fixture(params=VARIANTS.values(), ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _outside_services_that_work(settings: Any) -> None:
    settings.PAYMENT_DECLINE_RATE = settings.PAYMENT_FLAKY_RATE = 0.0
    settings.CREDIT_REFUSE_RATE = settings.CREDIT_SILENT_RATE = 0.0


# Step by step, without a database


def asked(variant: Variant) -> Scenario:
    scenario = Scenario(variant.credit_check)
    scenario.when(variant.messages.CheckCredit(order_id=ORDER, amount=LARGE))
    return scenario


def test_a_check_asks_the_agency_and_waits_an_hour(variant: Variant) -> None:
    messages = variant.messages

    then = asked(variant).then

    assert then.sent == [
        messages.AskAgency(order_id=ORDER, amount=LARGE),
        messages.AgencyOverdue(),
    ]
    assert then.delays[messages.AgencyOverdue] == timedelta(hours=1)


@pytest.mark.parametrize(("approved", "reason"), [(True, ""), (False, "credit refused by agency")])
def test_the_answer_of_the_agency_is_the_reply(
    variant: Variant, approved: bool, reason: str
) -> None:
    messages, scenario = variant.messages, asked(variant)

    then = scenario.when(messages.AgencyAnswered(approved=approved))

    assert then.replied == [messages.CreditChecked(approved=approved, reason=reason)]
    assert scenario.lifecycle == "completed"
    assert scenario.state.approved is approved


def test_an_agency_that_says_nothing_within_the_hour_is_a_refusal(variant: Variant) -> None:
    messages, scenario = variant.messages, asked(variant)

    [then] = scenario.advance(timedelta(hours=1))

    reply = messages.CreditChecked(approved=False, reason="no answer from agency")
    assert then.replied == [reply]
    assert scenario.lifecycle == "completed"


# Parent and child, on the real tables


def test_a_large_order_with_credit_is_fulfilled(variant: Variant, workflows: ModuleType) -> None:
    order = variant.place_order(amount=LARGE)

    workflows.run_until_idle()

    check = variant.models.CreditCheckState.objects.get(order_id=order.pk)
    assert (check.approved, check.lifecycle) == (True, "completed")
    assert variant.state.objects.get().status == "completed"


def test_a_small_order_is_not_checked(variant: Variant, workflows: ModuleType) -> None:
    variant.place_order(amount=Decimal(1000))

    workflows.run_until_idle()

    assert not variant.models.CreditCheckState.objects.exists()
    assert variant.state.objects.get().status == "completed"


def test_a_large_order_without_credit_is_declined_and_not_charged(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    settings.CREDIT_REFUSE_RATE = 1.0
    variant.place_order(amount=LARGE)

    workflows.run_until_idle()

    fulfilment = variant.state.objects.get()
    assert (fulfilment.status, fulfilment.declined_because) == (
        "declined",
        "credit refused by agency",
    )
    assert not variant.rows["payments"].objects.exists()


def test_a_silent_agency_is_waited_for_an_hour(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    settings.CREDIT_SILENT_RATE = 1.0
    variant.place_order(amount=LARGE)
    workflows.run_until_idle()

    workflows.advance(timedelta(minutes=59))
    before = variant.state.objects.get().lifecycle
    workflows.advance(timedelta(minutes=1))

    assert before == "running"
    assert variant.state.objects.get().declined_because == "no answer from agency"


def test_each_order_hears_of_its_own_credit(
    variant: Variant, workflows: ModuleType, settings: Any
) -> None:
    """The replies of many children at once reach their own parents."""
    settings.CREDIT_REFUSE_RATE = 0.5
    for _ in range(12):
        variant.place_order(amount=LARGE)

    workflows.run_until_idle()

    checks = variant.models.CreditCheckState.objects.values_list("order_id", "approved")
    fulfilments = variant.state.objects.values_list("order_id", "status")
    expected = {order_id: "completed" if approved else "declined" for order_id, approved in checks}
    assert dict(fulfilments) == expected
    assert len(expected) == 12
