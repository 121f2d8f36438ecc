"""The one function that replays, as code calls it."""

from datetime import timedelta
from itertools import chain

import pytest
from django.utils import timezone

from django_workflows import Event, define_workflow, handles, replaying
from django_workflows.errors import NotDeclared
from django_workflows.models import Delivery, Status
from django_workflows.replaying import replay, select
from tests.concurrency import at_once
from tests.models import ParcelState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)


def is_due(delivery: Delivery) -> bool:
    delivery.refresh_from_db()
    return delivery.status == Status.PENDING


@pytest.mark.parametrize("status", [Status.FAILED, Status.IGNORED, Status.CANCELLED])
def test_what_failed_was_ignored_or_cancelled_is_due_again_with_a_fresh_count(
    status: Status,
) -> None:
    delivery = stored(status=status, attempts=10, losses=5, reason="no more", claims=7)

    count = replay(Delivery.objects.all())

    delivery.refresh_from_db()
    assert count == 1
    assert (delivery.status, delivery.attempts, delivery.losses) == (Status.PENDING, 0, 0)
    assert delivery.relay_at is not None
    assert delivery.relay_at <= timezone.now() + timedelta(seconds=1)
    assert (delivery.ended_at, delivery.claims) == (None, 7)


@pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.HANDLED])
def test_what_is_pending_running_or_handled_is_left_alone(status: Status) -> None:
    delivery = stored(status=status, attempts=3, claims=1)

    count = replay(Delivery.objects.all())

    delivery.refresh_from_db()
    assert count == 0
    assert (delivery.status, delivery.attempts) == (status, 3)


def test_the_limit_takes_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "BATCH", 2)
    deliveries = [stored() for _ in range(5)]

    count = replay(Delivery.objects.all(), limit=3)

    assert count == 3
    assert [is_due(delivery) for delivery in deliveries] == [True, True, True, False, False]


def test_an_interrupted_replay_keeps_what_it_did_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replaying, "BATCH", 2)
    deliveries = [stored() for _ in range(5)]

    def interrupt(batch: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(Delivery.objects.all(), on_batch=interrupt)
    after_the_interruption = [is_due(delivery) for delivery in deliveries]
    count = replay(Delivery.objects.all())

    assert after_the_interruption == [True, True, False, False, False]
    assert count == 3
    assert all(is_due(delivery) for delivery in deliveries)


def test_two_replays_at_once_share_the_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "BATCH", 10)
    deliveries = [stored() for _ in range(100)]
    replayed: list[list[Delivery]] = []

    def run() -> int:
        return replay(Delivery.objects.all(), on_batch=lambda batch: replayed.append([*batch]))

    counts = at_once(run, run)

    assert sum(counts) == 100
    assert {row.pk for row in chain(*replayed)} == {delivery.pk for delivery in deliveries}
    assert sum(map(len, replayed)) == 100


def test_what_fails_again_at_once_is_not_replayed_twice_by_one_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replaying, "BATCH", 1)
    for _ in range(3):
        stored()

    def fail_again(batch: object) -> None:
        Delivery.objects.filter(status=Status.PENDING).update(status=Status.FAILED, relay_at=None)

    count = replay(Delivery.objects.all(), on_batch=fail_again)

    assert count == 3


@pytest.mark.usefixtures("own_registry")
class TestSelect:
    def test_names_include_the_aliases_that_rows_still_have(self) -> None:
        class ParcelLost(Event, name="shop.ParcelLost", aliases=["shop.ParcelGone"]):
            pass

        handles(ParcelLost, name="shop.search", aliases=["shop.seek"])(lambda m, c: None)
        old = stored(message_name="shop.ParcelGone", handler="shop.seek")
        stored(message_name="shop.ParcelGone", handler="shop.other")

        found = select(message="shop.ParcelLost", handler="shop.search")

        assert [delivery.pk for delivery in found] == [old.pk]

    def test_a_workflow_is_chosen_by_its_name(self) -> None:
        define_workflow(ParcelState)
        wanted = stored(handler="tests.ParcelState")
        stored(handler="tests.InvoiceState")

        found = select(workflow="tests.ParcelState")

        assert [delivery.pk for delivery in found] == [wanted.pk]

    def test_since_is_included_and_until_is_not(self) -> None:
        noon = timezone.now().replace(microsecond=0)
        stored(ended_at=noon - timedelta(seconds=1))
        wanted = stored(ended_at=noon)
        stored(ended_at=noon + timedelta(hours=1))

        found = select(since=noon, until=noon + timedelta(hours=1))

        assert [delivery.pk for delivery in found] == [wanted.pk]

    def test_a_handler_is_no_workflow(self) -> None:
        define_workflow(ParcelState)

        with pytest.raises(NotDeclared, match=r"No handler is named 'tests\.ParcelState'"):
            select(handler="tests.ParcelState")
