"""A database with a million deliveries: `python -m benchmarks.fill`, to look at, or to measure on.

200,000 instances of the test project's order process, five deliveries each, begun over 30 days:
most completed, some running with a timeout that waits or is overdue, some with a failed delivery.
The server makes the rows, with INSERT ... SELECT.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from django.core.management import call_command
from django.db import connection, connections, models

from benchmarks.database import address
from django_workflows.models import Delivery
from testproject.orders.models import FulfilmentState

INSTANCES = 200_000
DAYS = 30.0
NAME = "benchmark_filled"

#: Of a hundred instances so many are running: their last delivery has failed, is overdue, or waits.
FAILED, OVERDUE, WAITING = 1, 1, 3
RUNNING = FAILED + OVERDUE + WAITING

#: What each instance has been through: message, handler, and whether that is the workflow itself.
SCRIPT = (
    ("orders.OrderPlaced", "orders.FulfilmentState", True),
    ("orders.TakePayment", "orders.take_payment", False),
    ("orders.PaymentTaken", "orders.FulfilmentState", True),
    ("orders.PickStock", "orders.pick_stock", False),
    ("orders.StockPicked", "orders.FulfilmentState", True),
)


@dataclass(frozen=True)
class Filled:
    instances: int
    deliveries: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fill", description=__doc__)
    parser.add_argument("--name", default=NAME, help=f"of the database to make ({NAME})")
    parser.add_argument("--instances", type=int, default=INSTANCES)
    parser.add_argument("--days", type=float, default=DAYS, help="over which they began (30)")
    parser.add_argument("--drop", action="store_true", help="only drop the database")
    options = parser.parse_args()
    use(options.name, make=not options.drop)
    if not options.drop:
        filled = fill(options.instances, options.days)
        print(json.dumps({"database": options.name, **asdict(filled)}))


def use(name: str, *, make: bool = True) -> None:
    """Drop the database of this name, make it anew unless told not to, and point Django at it."""
    if connection.vendor != "postgresql":
        raise SystemExit(f"This needs Postgres, and DATABASE_URL names {connection.vendor}.")
    with psycopg.connect(**{**address(), "dbname": "postgres"}, autocommit=True) as server:
        server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        if make:
            server.execute(f'CREATE DATABASE "{name}"')
    connections.close_all()
    connection.settings_dict["NAME"] = name
    if make:
        call_command("migrate", verbosity=0)


def fill(instances: int = INSTANCES, days: float = DAYS, *, ago: float = 0.0) -> Filled:
    """Fill the tables of Django's database; the youngest instance began `ago` days ago."""
    began = time.monotonic()
    params = {"instances": instances, "days": days, "ago": ago}
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
        cursor.execute(UUID_AT)
        insert(cursor, FulfilmentState, INSTANCE, INSTANCES_BEGUN, params)
        insert(cursor, Delivery, DELIVERY, deliveries_made(), {})
        cursor.execute("VACUUM ANALYZE")
    counts = FulfilmentState.objects.count(), Delivery.objects.count()
    return Filled(*counts, round(time.monotonic() - began, 1))


def insert(
    cursor: Any, model: type[models.Model], given: dict[str, str], origin: str, params: Any
) -> None:
    """Insert what `origin` selects; the columns that are not given have their field's default."""
    defaults, columns, values = {}, [], []
    for field in model._meta.concrete_fields:
        columns.append(f'"{field.column}"')
        values.append(given.get(field.column, f"%({field.column})s"))
        if field.column not in given:
            default = field.get_db_prep_save(field.get_default(), connection)
            defaults[field.column] = default
    cursor.execute(
        f"INSERT INTO {model._meta.db_table} ({', '.join(columns)}) "
        f"SELECT {', '.join(values)} FROM ({origin}) AS origin",
        {**defaults, **params},
    )


#: A UUIDv7 of a moment; the number makes it unique.
UUID_AT = """
CREATE OR REPLACE FUNCTION pg_temp.uuid_at(moment timestamptz, number bigint) RETURNS uuid
LANGUAGE sql AS $$
  SELECT (lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0')
    || '7' || substr(md5(number::text), 1, 3) || '8' || substr(md5(number::text), 4, 15))::uuid
$$
"""

INSTANCES_BEGUN = """
SELECT number, pg_temp.uuid_at(began_at, number) AS id, began_at FROM (
  SELECT number, statement_timestamp() - interval '5 minutes' - interval '1 day' * %(ago)s
    - interval '1 day' * %(days)s * (1 - number::float / %(instances)s) AS began_at
  FROM generate_series(1, %(instances)s) AS number
) AS numbered
"""

INSTANCE = {
    "id": "id",
    "version": "3",
    "lifecycle": f"CASE WHEN number %% 100 < {RUNNING} THEN 'running' ELSE 'completed' END",
    "started_at": "began_at",
    "updated_at": "began_at + interval '4 minutes'",
    "ended_at": f"CASE WHEN number %% 100 >= {RUNNING} THEN began_at + interval '4 minutes' END",
    "order_id": "gen_random_uuid()",
    "amount": "19.90",
    "paid_at": "began_at + interval '2 minutes'",
}


def deliveries_made() -> str:
    rows = ", ".join(
        f"({place}, '{message}', '{handler}', {to_workflow})"
        for place, (message, handler, to_workflow) in enumerate(SCRIPT)
    )
    last = len(SCRIPT) - 1
    return f"""
SELECT *, pg_temp.uuid_at(made_at, number * 10 + place) AS id,
  CASE kind WHEN 'waits' THEN statement_timestamp() + interval '1 day'
    WHEN 'overdue' THEN statement_timestamp() - interval '3 minutes' ELSE made_at END AS due_at
FROM (
  SELECT script.*, s.number, s.id AS instance_id, s.order_id,
    s.started_at + interval '1 minute' * place AS made_at,
    CASE WHEN place < {last} OR s.lifecycle = 'completed' THEN 'handled'
      WHEN number %% 100 < {FAILED} THEN 'failed'
      WHEN number %% 100 < {FAILED + OVERDUE} THEN 'overdue' ELSE 'waits' END AS kind
  FROM (SELECT *, row_number() OVER (ORDER BY id) AS number FROM
    {FulfilmentState._meta.db_table}) AS s
  CROSS JOIN (VALUES {rows}) AS script (place, message, handler, to_workflow)
) AS placed"""


ERROR = "'ValueError: the stock is closed'"
TRACEBACK = "repeat('  File \"orders/handlers.py\", line 7, in pick' || chr(10), 20)"

DELIVERY = {
    "id": "id",
    "message_id": "id",
    "message_name": "message",
    "body": '\'{"order_id": "\' || order_id || \'", "amount": "19.90"}\'',
    "correlation_id": "instance_id",
    "workflow_ids": "jsonb_build_object('orders.FulfilmentState', instance_id)",
    "handler": "handler",
    "instance_id": "CASE WHEN to_workflow THEN instance_id END",
    "sender": "CASE WHEN place > 0 THEN 'orders.FulfilmentState' ELSE '' END",
    "sender_instance_id": "CASE WHEN place > 0 THEN instance_id END",
    "sender_step": "CASE WHEN place > 0 THEN 'step' ELSE '' END",
    "status": "CASE WHEN kind IN ('waits', 'overdue') THEN 'pending' ELSE kind END",
    "claims": "1",
    "attempts": "CASE kind WHEN 'failed' THEN 10 ELSE 0 END",
    "reason": f"CASE kind WHEN 'failed' THEN {ERROR} ELSE '' END",
    "error": f"CASE kind WHEN 'failed' THEN {ERROR} ELSE '' END",
    "error_class": "CASE kind WHEN 'failed' THEN 'ValueError' ELSE '' END",
    "traceback": f"CASE kind WHEN 'failed' THEN {TRACEBACK} ELSE '' END",
    "step": "CASE WHEN to_workflow AND kind = 'handled' THEN 'step' ELSE '' END",
    "version": "CASE WHEN to_workflow AND kind = 'handled' THEN place / 2 + 1 END",
    "changes": "CASE WHEN to_workflow AND kind = 'handled' "
    'THEN \'{"status": ["placed", "paid"]}\'::jsonb END',
    "created_at": "made_at",
    "due_at": "due_at",
    "started_at": "CASE WHEN kind IN ('handled', 'failed') THEN made_at END",
    "ended_at": "CASE WHEN kind IN ('handled', 'failed') THEN made_at + interval '1 second' END",
    "relay_at": "CASE WHEN kind IN ('waits', 'overdue') THEN due_at END",
}


if __name__ == "__main__":
    main()
