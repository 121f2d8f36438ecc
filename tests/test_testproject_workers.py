"""The processes of testproject through real workers, in both styles."""

import json
import subprocess
import uuid
from collections.abc import Callable
from decimal import Decimal

import pytest

from testproject.variants import VARIANTS, Variant
from tests.concurrency import wait_until
from tests.processes import Workers

pytestmark = pytest.mark.django_db(transaction=True)

HONEST = {"PAYMENT_DECLINE_RATE": "0", "PAYMENT_FLAKY_RATE": "0"}


@pytest.fixture(params=VARIANTS.values(), ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.postgres
def test_orders_that_cannot_be_shipped_are_counted_as_compensated(
    variant: Variant,
    manage: Callable[..., "subprocess.CompletedProcess[str]"],
    rundramatiq: Callable[..., Workers],
) -> None:
    rundramatiq(env={"SHIPMENT_FAIL_RATE": "0.5", "PAYMENT_FLAKY_RATE": "0"})

    said = manage("place_orders", 24, "--wait", "--json", "--style", variant.style).stdout

    figures = json.loads(said)
    ends = [figures[name] for name in ("completed", "declined", "compensated", "unfinished")]
    assert sum(ends) == figures["orders"] == 24
    assert figures["unfinished"] == 0
    assert 1 <= figures["compensated"] <= 23
    assert figures["rows"]["refunds"] == figures["rows"]["restocks"] == figures["compensated"]
    assert figures["rows"]["shipments"] == figures["completed"]


@pytest.mark.postgres
def test_the_credit_of_large_orders_is_checked_and_silence_is_a_refusal(
    variant: Variant, rundramatiq: Callable[..., Workers]
) -> None:
    rundramatiq(
        env={**HONEST, "CREDIT_REFUSE_RATE": "0", "CREDIT_SILENT_RATE": "0.5"}
        | {"AGENCY_OVERDUE_AFTER": "3"}
    )

    for number in range(12):  # the same ids every time, and so the same answers
        variant.place_order(uuid.uuid5(uuid.NAMESPACE_OID, str(number)), Decimal(5000))
    wait_until(lambda: variant.state.objects.filter(ended_at__isnull=False).count() == 12, 60)

    approved = dict(variant.models.CreditCheckState.objects.values_list("order_id", "approved"))
    ended = dict(variant.state.objects.values_list("order_id", "status"))
    assert ended == {
        order_id: "completed" if good else "declined" for order_id, good in approved.items()
    }
    assert set(ended.values()) == {"completed", "declined"}


def test_a_batch_order_joins_its_parcels(
    variant: Variant, rundramatiq: Callable[..., Workers]
) -> None:
    rundramatiq(threads=4)

    variant.place_batch(60)
    batches = variant.models.BatchOrderState.objects
    wait_until(lambda: batches.filter(lifecycle="completed").exists(), timeout=60)

    assert batches.get().grams == sum(500 + number for number in range(1, 61))
    assert variant.models.Parcel.objects.count() == 60
