"""Orders that nobody can deliver, undone by real workers, with a kill -9 in the middle of it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_workflows.models import Delivery
from testproject.variants import CLASS, FUNCTIONS, Variant
from tests.concurrency import at_once, wait_until
from tests.processes import Workers, workflow_settings

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

ORDERS = 8
NOBODY_DELIVERS = {
    "SHIPMENT_FAIL_RATE": "1",
    "PAYMENT_DECLINE_RATE": "0",
    "PAYMENT_FLAKY_RATE": "0",
    # A worker that was killed is missed after three seconds instead of half a minute.
    **workflow_settings(LEASE=timedelta(seconds=3)),
}


def test_orders_are_refunded_then_restocked_once_though_workers_are_killed_at_it(
    rundramatiq: Callable[..., Workers], broker_url: str
) -> None:
    workers = rundramatiq(broker_url, processes=2, threads=2, env=NOBODY_DELIVERS)

    kill_in_the_middle_of(CLASS, "refunds", workers)

    assert_each_order_is_undone_once(CLASS)


@pytest.mark.parametrize("undoing", ["refunds", "restocks"])
def test_orders_declared_with_functions_are_undone_once_though_workers_are_killed_at_it(
    rundramatiq: Callable[..., Workers], undoing: str
) -> None:
    workers = rundramatiq(processes=2, threads=2, env=NOBODY_DELIVERS)

    kill_in_the_middle_of(FUNCTIONS, undoing, workers)

    assert_each_order_is_undone_once(FUNCTIONS)


def kill_in_the_middle_of(variant: Variant, undoing: str, workers: Workers) -> None:
    """Place orders, and kill all workers at a moment at which some hold this undoing half done."""
    table = variant.rows[undoing]._meta.db_table
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")  # rows of it wait for our commit
        in_own_connection(place_orders, variant)
        wait_until(lambda: in_own_connection(insert_waits, table), timeout=60)
        workers.kill()
    workers.start()
    wait_until(lambda: ended(variant) == ORDERS, timeout=90)
    workers.stop()


def place_orders(variant: Variant) -> None:
    for _ in range(ORDERS):
        variant.place_order()


def insert_waits(table: str) -> bool:
    """Whether a worker has an undo command half done, and waits to write the row of it."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock' AND query LIKE %s",
            [f'INSERT INTO "{table}"%'],
        )
        return bool(cursor.fetchone()[0]) and running_undo().exists()


def running_undo() -> Any:
    return Delivery.objects.filter(undoes=True, status="running")


def in_own_connection(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it on another thread, whose connection has no transaction open."""
    [result] = at_once(lambda: function(*arguments))
    if isinstance(result, Exception):
        raise result
    return result


def ended(variant: Variant) -> int:
    return int(variant.state.objects.filter(ended_at__isnull=False).count())


def assert_each_order_is_undone_once(variant: Variant) -> None:
    orders = set(variant.order.objects.values_list("id", flat=True))
    instances = variant.state.objects.values_list("order_id", "lifecycle")
    refunds = variant.rows["refunds"].objects.values_list("order_id", "created_at")
    restocks = variant.rows["restocks"].objects.values_list("order_id", "created_at")
    assert len(orders) == ORDERS
    assert dict(instances) == dict.fromkeys(orders, "compensated")
    assert sorted(order_id for order_id, _at in refunds) == sorted(orders)
    assert sorted(order_id for order_id, _at in restocks) == sorted(orders)
    restocked_at = dict(restocks)
    assert all(refunded_at < restocked_at[order_id] for order_id, refunded_at in refunds)
    assert not variant.rows["shipments"].objects.exists()
    undone = Delivery.objects.filter(undoes=True)
    assert undone.filter(status="handled").count() == undone.count() == 2 * ORDERS
    assert undone.filter(losses__gt=0).exists(), "nobody was killed in the middle of undoing"
