"""The one source of time: the database's clock on Postgres, UTC of this machine on SQLite."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: How far the test clock has been moved on; zero outside tests.
offset = timedelta(0)


def sql() -> str:
    """Now, as a Postgres expression. `statement_timestamp()` moves on within a transaction."""
    if not offset:
        return "statement_timestamp()"
    return f"(statement_timestamp() + interval '{offset.total_seconds()} seconds')"


def local() -> datetime:
    """Now, aware, by this machine's clock."""
    return datetime.now(UTC) + offset


def read(connection: BaseDatabaseWrapper) -> datetime:
    """Now, aware, by the clock of this database: one statement on Postgres, none on SQLite."""
    if connection.vendor != "postgresql":
        return local()
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {sql()}")
        moment: datetime = cursor.fetchone()[0]
    return moment


def first_id_at(moment: datetime) -> UUID:
    """The smallest UUIDv7 of this moment: ids of rows that were made before are smaller."""
    return UUID(int=max(int(moment.timestamp() * 1000), 0) << 80)
