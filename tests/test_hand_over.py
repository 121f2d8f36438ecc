"""From the commit to the workers: what a crash or a failing broker leaves to the relay."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, Queue
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from django.db.models import Count

from django_workflows import actors, dispatch, outbox, publish, relay
from django_workflows.models import Delivery, Status
from testproject.variants import CLASS
from tests.concurrency import at_once, wait_until
from tests.delivering import delivery_of
from tests.processes import ROOT, environment, workflow_settings
from tests.racing import Background

pytestmark = pytest.mark.django_db(transaction=True)

OrderPlaced, TakePayment = CLASS.messages.OrderPlaced, CLASS.messages.TakePayment


class Courier:
    """A transport that carries ids to threads of the test; every `fails_every`th time it raises."""

    hands_over = True

    def __init__(self, fails_every: int = 0) -> None:
        self.ids: Queue[UUID] = Queue()
        self.failures = 0
        self._fails_every = fails_every
        self._calls = 0
        self._lock = threading.Lock()

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None:
        with self._lock:
            self._calls += 1
            if self._fails_every and self._calls % self._fails_every == 0:
                self.failures += 1
                raise ConnectionError("the broker is away")
        for delivery_id in ids:
            self.ids.put(delivery_id)

    def deliver_until(self, condition: Callable[[], bool]) -> None:
        """Deliver what arrives, on the thread of the caller."""

        def deliver_next() -> bool:
            try:
                dispatch.deliver(self.ids.get(timeout=0.05))
            except Empty:
                return condition()
            return False

        wait_until(deliver_next, timeout=120, every=0)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[outbox.Transport], None]:
    return lambda transport: monkeypatch.setattr(outbox, "transport", transport)


@pytest.fixture(autouse=True)
def _quick_relay_and_honest_provider(settings: Any) -> None:
    settings.DJANGO_WORKFLOWS = {
        "LEASE": timedelta(seconds=1),
        "RELAY_EVERY": timedelta(seconds=0.1),
    }
    settings.PAYMENT_DECLINE_RATE = settings.PAYMENT_FLAKY_RATE = 0.0


def all_completed(orders: int = 1) -> bool:
    return bool(CLASS.state.objects.filter(status="completed").count() == orders)


def relay_and_extend_leases() -> tuple[Background, Background]:
    """What the middleware runs in a worker."""
    return Background(relay.run), Background(actors.extend_leases)


CRASHES_AT_THE_HAND_OVER = """
import os, sys, uuid
import django

django.setup()
from django_workflows import dispatch, outbox

class Crash:
    hands_over = True

    def hand_over(self, queue, ids):
        os._exit(70)

outbox.transport = Crash()
dispatch.deliver(uuid.UUID(sys.argv[1]))
"""


# B12
def test_what_a_crash_after_the_commit_left_behind_is_handed_over_by_the_relay(
    database_url: str, use: Callable[[outbox.Transport], None]
) -> None:
    CLASS.place_order()
    placed = delivery_of(OrderPlaced)
    env = environment(database_url, "db://", workflow_settings(LEASE=timedelta(seconds=1)))
    command = [sys.executable, "-c", CRASHES_AT_THE_HAND_OVER, str(placed.pk)]

    crashed = subprocess.run(command, cwd=ROOT, env=env, timeout=60, check=False)
    left_behind = delivery_of(TakePayment)
    courier = Courier()
    use(courier)
    with Background(relay.run):
        courier.deliver_until(all_completed)

    assert crashed.returncode == 70
    assert left_behind.status == Status.PENDING
    assert list(CLASS.rows["payments"].objects.values_list("order_id")) == [
        (CLASS.order.objects.get().pk,)
    ]
    placed.refresh_from_db()
    assert (placed.status, placed.claims, placed.version) == (Status.HANDLED, 1, 1)
    assert delivery_of(TakePayment).pk == left_behind.pk


# B12, where the hand-over raises instead
def test_what_the_transport_refused_at_the_commit_is_handed_over_by_the_relay(
    use: Callable[[outbox.Transport], None], caplog: pytest.LogCaptureFixture
) -> None:
    use(Courier(fails_every=1))

    with caplog.at_level(logging.WARNING, "django_workflows.outbox"):
        CLASS.place_order()
    working = Courier()
    use(working)
    with Background(relay.run):
        working.deliver_until(all_completed)

    assert "the relay will" in caplog.text
    assert delivery_of(OrderPlaced).claims == 1


# B18
def test_every_step_and_message_is_there_once_although_every_fifth_hand_over_raises(
    use: Callable[[outbox.Transport], None],
) -> None:
    courier = Courier(fails_every=5)
    use(courier)
    relaying, extending = relay_and_extend_leases()

    with relaying, extending:
        for _ in range(20):
            CLASS.place_order()
        done = lambda: all_completed(20)  # noqa: E731
        ended = at_once(*[lambda: courier.deliver_until(done)] * 3, timeout=150)

    assert ended == [None] * 3
    assert courier.failures > 10
    done_once = {"payments": 20, "picks": 20, "shipments": 20, "receipts": 20}
    undone = {"refunds": 0, "restocks": 0}
    rows = {name: model.objects.count() for name, model in CLASS.rows.items()}
    assert rows == {**done_once, **undone}
    sent = Delivery.objects.filter(undoes=False).values_list("message_name").annotate(Count("id"))
    assert set(sent.values_list("id__count", flat=True)) == {20}
    assert sent.count() == 10
    assert set(Delivery.objects.values_list("attempts", flat=True)) == {0}
    # placed, paid, picked, shipped, completed: one version for each
    assert set(CLASS.state.objects.values_list("version", flat=True)) == {5}


def test_nothing_is_handed_over_before_the_commit(use: Callable[[outbox.Transport], None]) -> None:
    courier = Courier()
    use(courier)

    with transaction.atomic():
        publish(OrderPlaced(order_id=UUID(int=1), amount=1))
        before = courier.ids.qsize()

    assert (before, courier.ids.qsize()) == (0, 1)
