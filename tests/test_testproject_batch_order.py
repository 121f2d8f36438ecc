"""The batch order of testproject, which joins its parcels, tested in both styles."""

import uuid
from types import ModuleType

import pytest

from django_workflows import publish
from django_workflows.testing import Scenario, record
from testproject.variants import VARIANTS, Variant

BATCH = uuid.UUID("01a22e00-0000-7000-8000-000000000002")


@pytest.fixture(params=VARIANTS.values(), ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


def test_a_batch_has_each_of_its_parcels_packed(variant: Variant) -> None:
    messages, scenario = variant.messages, Scenario(variant.batch_order)

    then = scenario.when(messages.BatchPlaced(batch_id=BATCH, parcels=3))

    assert then.sent == [messages.PackParcel(batch_id=BATCH, parcel=n) for n in (1, 2, 3)]


@pytest.mark.django_db
def test_a_parcel_is_stored_and_answered(variant: Variant) -> None:
    messages, called = variant.messages, record()

    variant.handlers.pack_parcel(messages.PackParcel(batch_id=BATCH, parcel=7), called.context)

    assert called.replied == [messages.ParcelPacked(parcel=7, grams=507)]


def test_a_batch_is_weighed_once_when_all_its_parcels_are_packed(
    variant: Variant, workflows: ModuleType
) -> None:
    variant.place_batch(40)

    workflows.run_until_idle()

    batch = variant.models.BatchOrderState.objects.get()
    assert batch.lifecycle == "completed"
    assert batch.grams == sum(500 + number for number in range(1, 41))
    assert batch.version == 2, "forty arrivals have not touched the instance"


def test_a_batch_waits_for_the_parcel_that_is_missing(
    variant: Variant, workflows: ModuleType
) -> None:
    """Its row is in the way; the batch goes on once it is not, and its command is replayed."""
    parcels = variant.models.Parcel.objects
    in_the_way = parcels.create(batch_id=BATCH, number=2, grams=1)
    variant.place_batch(3, BATCH)
    workflows.run_until_idle()
    before = variant.models.BatchOrderState.objects.get().lifecycle

    in_the_way.delete()
    workflows.advance(workflows.failed()[0].due_at - workflows.failed()[0].created_at)

    assert before == "running"
    assert variant.models.BatchOrderState.objects.get().grams == 501 + 502 + 503


def test_a_batch_announced_twice_is_packed_once(variant: Variant, workflows: ModuleType) -> None:
    variant.place_batch(2, BATCH)
    variant.place_batch(2, BATCH)

    workflows.run_until_idle()

    assert variant.models.Parcel.objects.count() == 2
    assert variant.models.BatchOrderState.objects.get().grams == 501 + 502


def test_an_empty_batch_is_complete_at_once(variant: Variant, workflows: ModuleType) -> None:
    publish(variant.messages.BatchPlaced(batch_id=BATCH, parcels=0))

    workflows.run_until_idle()

    assert variant.models.BatchOrderState.objects.get().lifecycle == "completed"
