"""Orders from placing to receipt, by worker processes, over each broker."""

import json
import subprocess
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_workflows.models import UNENDED, Delivery, Status
from testproject.variants import CLASS, VARIANTS
from tests.concurrency import wait_until
from tests.processes import Workers, workflow_settings
from tests.services import wipe_broker

pytestmark = pytest.mark.django_db(transaction=True)

Manage = Callable[..., subprocess.CompletedProcess[str]]
RunDramatiq = Callable[..., Workers]

SHORT_LEASE = workflow_settings(LEASE=timedelta(seconds=2))


def assert_accounted_for(summary: dict[str, Any], orders: int) -> None:
    """Every order has ended, once, and nothing is left over."""
    completed, declined = summary["completed"], summary["declined"]
    assert (completed + declined, summary["unfinished"]) == (orders, 0)
    rows = dict(summary["rows"])
    undone = {"refunds": 0, "restocks": 0}
    assert rows == dict.fromkeys(rows, completed) | undone
    # The timeout of the payment is cancelled; all else has been handled.
    assert summary["deliveries"] == {
        "handled": 9 * completed + 3 * declined,
        "cancelled": orders,
    }


@pytest.mark.parametrize("style", sorted(VARIANTS))
def test_every_order_is_accounted_for(
    broker_url: str, style: str, manage: Manage, rundramatiq: RunDramatiq
) -> None:
    rundramatiq(broker_url, processes=2)

    placed = manage("place_orders", 20, "--wait", "--json", "--style", style, broker_url=broker_url)

    assert_accounted_for(json.loads(placed.stdout), 20)


@pytest.fixture(params=["redis", "rabbitmq"])
def wipeable_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


# B19
def test_what_waits_in_a_broker_that_is_wiped_is_handled_all_the_same(
    wipeable_url: str, manage: Manage, rundramatiq: RunDramatiq
) -> None:
    manage("place_orders", 20, broker_url=wipeable_url, env=SHORT_LEASE)
    handed_over = waiting_in(wipeable_url)

    wipe_broker(wipeable_url, ["default"])
    left = waiting_in(wipeable_url)
    rundramatiq(wipeable_url, env=SHORT_LEASE)

    assert (handed_over, left) == (20, 0)
    wait_until_all_have_ended(60)
    assert CLASS.state.objects.filter(ended_at__isnull=False).count() == 20
    assert not Delivery.objects.filter(status=Status.FAILED).exists()


# B19
def test_a_broker_wiped_three_times_while_workers_are_at_work_loses_nothing(
    wipeable_url: str, manage: Manage, rundramatiq: RunDramatiq
) -> None:
    manage("place_orders", 60, broker_url=wipeable_url, env=SHORT_LEASE)
    rundramatiq(wipeable_url, processes=2, env=SHORT_LEASE)

    for _ in range(3):
        handled = Delivery.objects.filter(status=Status.HANDLED)
        goal = handled.count() + 20
        wait_until(lambda: handled.count() >= goal, timeout=30)  # noqa: B023
        wipe_broker(wipeable_url, ["default"])
    ended_too_early = all_have_ended()
    wait_until_all_have_ended(90)

    assert not ended_too_early
    completed = CLASS.state.objects.filter(status="completed").count()
    declined = CLASS.state.objects.filter(status="declined").count()
    assert completed + declined == 60
    rows = {name: model.objects.count() for name, model in CLASS.rows.items()}
    assert rows == dict.fromkeys(rows, completed) | {"refunds": 0, "restocks": 0}
    assert set(Delivery.objects.values_list("status", flat=True)) == {"handled", "cancelled"}


def all_have_ended() -> bool:
    return not Delivery.objects.filter(status__in=UNENDED).exists()


def wait_until_all_have_ended(timeout: float) -> None:
    """As `wait_until`, and a failure shows what has not ended."""
    try:
        wait_until(all_have_ended, timeout)
    finally:
        for row in Delivery.objects.filter(status__in=UNENDED).values():
            print(row)  # noqa: T201


def waiting_in(url: str) -> int:
    """How many messages the broker's queue holds that no worker has taken."""
    if url.startswith("redis"):
        import redis

        with redis.Redis.from_url(url) as client:
            return int(client.llen("dramatiq:default"))
    import pika

    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        queue = connection.channel().queue_declare("default", passive=True)
        return int(queue.method.message_count)
    finally:
        connection.close()
