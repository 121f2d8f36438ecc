"""The database of the deliveries: what it is, and how it is connected to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage
from django.db import router
from django.db.backends.base.base import BaseDatabaseWrapper

from django_workflows import outbox, registry
from django_workflows.checks.reports import Problems, error, path, warning

OLDEST_SQLITE = (3, 35)  # RETURNING
TIMEOUTS = ("lock_timeout", "idle_in_transaction_session_timeout")


def check_databases(**_kwargs: Any) -> list[CheckMessage]:
    """What the settings tell, without asking the database."""
    connection = outbox.database()
    found = list(states_elsewhere(connection.alias))
    match connection.vendor:
        case "postgresql":
            found += isolation_in_settings(connection)
        case "sqlite":
            found += old_sqlite(connection)
            found += deferred_transactions(connection)
        case vendor:
            found.append(other_vendor(connection.alias, vendor))
    return found


def check_connection(
    *, databases: Sequence[str] | None = None, **_kwargs: Any
) -> list[CheckMessage]:
    """What only the database can tell: `check --database default`, and every `migrate`."""
    connection = outbox.database()
    if connection.vendor != "postgresql" or connection.alias not in (databases or ()):
        return []
    return [*isolation_of_the_server(connection), *endless_waits(connection)]


def other_vendor(alias: str, vendor: str) -> CheckMessage:
    """E111: the statements are written for two."""
    return error(
        111,
        f"The database {alias!r}, where the deliveries are, is {vendor}.",
        "Use PostgreSQL or SQLite; a database router can send Delivery and the states to one.",
    )


def states_elsewhere(alias: str) -> Problems:
    """E115: one transaction holds the state and what it sends."""
    for workflow in registry.current().workflows:
        state = workflow.state
        if (other := router.db_for_write(state)) != alias:
            yield error(
                115,
                f"The state {path(state)} is written to the database {other!r} and the deliveries "
                f"to {alias!r}, which cannot commit together.",
                f"Let the database router send {state.__name__} and django_workflows.Delivery to "
                f"one database.",
                path(state),
            )


# SQLite


def old_sqlite(connection: BaseDatabaseWrapper) -> Problems:
    """E112: the statements return what they changed."""
    driver: Any = connection  # which has the module of the driver
    version = driver.Database.sqlite_version_info
    if version < OLDEST_SQLITE:
        yield error(
            112,
            f"SQLite is {'.'.join(map(str, version))} here, and 3.35 is the oldest that works.",
            "Use a Python that was built with a newer SQLite.",
        )


def deferred_transactions(connection: BaseDatabaseWrapper) -> Problems:
    """E113: a read that turns into a write fails at once, whatever the timeout."""
    mode = connection.settings_dict["OPTIONS"].get("transaction_mode")
    if str(mode).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        yield error(
            113,
            f"The SQLite database {connection.alias!r} has the transaction_mode {mode!r}, with "
            f"which two workers fail each other.",
            f"Set DATABASES[{connection.alias!r}]['OPTIONS']['transaction_mode'] = 'IMMEDIATE'.",
        )


# Postgres


def isolation_in_settings(connection: BaseDatabaseWrapper) -> Problems:
    """E114: under any other level, a long step conflicts with the extension of its own lease."""
    options = connection.settings_dict["OPTIONS"]
    level = options.get("isolation_level")
    if level is not None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel  # wants psycopg

        names = {known.value: known.name for known in IsolationLevel}
        if level != IsolationLevel.READ_COMMITTED:
            yield _isolation(connection, names.get(level, repr(level)), "isolation_level")
    elif found := re.search(_SETS_ISOLATION, options.get("options", "")):
        yield _isolation(connection, found[1], "options")


_SETS_ISOLATION = r"(?i)default_transaction_isolation\s*=\s*(serializable|repeatable)"


def isolation_of_the_server(connection: BaseDatabaseWrapper) -> Problems:
    """E114 again: the server, the database and the role have a default, too."""
    options = connection.settings_dict["OPTIONS"]
    if "isolation_level" in options or re.search(_SETS_ISOLATION, options.get("options", "")):
        return
    level = _show(connection, "default_transaction_isolation")
    if level not in ("read committed", "read uncommitted"):
        yield _isolation(connection, level, "")


def _isolation(connection: BaseDatabaseWrapper, level: Any, key: str) -> CheckMessage:
    alias = connection.alias
    where = f"DATABASES[{alias!r}]['OPTIONS'][{key!r}]" if key else "the server or the role"
    remedy = f"Remove it from {where}." if key else "ALTER ROLE ... SET it to 'read committed'."
    return error(
        114,
        f"The isolation level of the database {alias!r} is {level}, set by {where}; it must "
        f"be READ COMMITTED, or every long step would conflict with its own lease.",
        remedy,
    )


def endless_waits(connection: BaseDatabaseWrapper) -> Problems:
    """W111: a transaction that hangs holds up others, for ever unless there is a limit."""
    options = connection.settings_dict["OPTIONS"].get("options", "")
    for name in TIMEOUTS:
        if name not in options and _show(connection, name) == "0":
            yield warning(
                111,
                f"The database {connection.alias!r} has no {name}: a worker that hangs in a "
                f"transaction holds up others for ever.",
                f"Add '-c {name}={'5s' if name == 'lock_timeout' else '60s'}' to "
                f"DATABASES[{connection.alias!r}]['OPTIONS']['options'], or ALTER ROLE ... SET it.",
            )


def _show(connection: BaseDatabaseWrapper, name: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SHOW {name}")
        return str(cursor.fetchone()[0])
