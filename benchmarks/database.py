"""A database of the benchmark's own, and the two ways to reach it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.core.management import call_command
from django.db import connection

#: How Django may pass parameters to Postgres. `client`, its default, writes them into the SQL;
#: `server` sends them apart, so that a statement is parsed and planned once per connection.
BINDINGS: dict[str, dict[str, Any]] = {
    "server": {"server_side_binding": True, "prepare_threshold": 0},
    "client": {},
}


@contextmanager
def own_database(binding: str) -> Iterator[None]:
    """Make a database on the server of DATABASE_URL, point Django at it, and drop it in the end."""
    if connection.vendor != "postgresql":
        raise SystemExit(
            f"This benchmark needs Postgres and DATABASE_URL names {connection.vendor}. Set it to "
            f"postgres://user:password@host:5432/name; the benchmark makes a database of its own."
        )
    name = f"benchmark_{os.getpid()}"
    with psycopg.connect(**address(), autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        connection.settings_dict["NAME"] = name
        # As a worker should have it: a connection that stays open, without a ping per delivery.
        connection.settings_dict |= {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": False}
        connection.settings_dict["OPTIONS"] |= BINDINGS[binding]
        try:
            call_command("migrate", verbosity=0)
            yield
        finally:
            connection.close()
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def bare_connection() -> Iterator[psycopg.Connection[Any]]:
    """A connection of psycopg alone to the database that Django is pointed at."""
    with psycopg.connect(**address(), autocommit=True) as bare:
        yield bare


def wal_position(bare: psycopg.Connection[Any]) -> int:
    """How many bytes of WAL the whole server has written."""
    row = bare.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    return row[0] if row else 0


def address() -> dict[str, Any]:
    params = connection.get_connection_params()
    return {
        key: params[key] for key in ("dbname", "host", "port", "user", "password") if key in params
    }
