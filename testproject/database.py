"""DATABASE_URL: from the URL to Django's settings, and what to say when nothing answers there."""

import re
from pathlib import Path
from typing import Any

import environ
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connection

SQLITE = ("sqlite",)
POSTGRES = ("postgres", "postgresql", "psql", "pgsql")


class UnusableError(Exception):
    """The database of DATABASE_URL does not answer, or its tables are missing."""


def database_settings(url: str, base_dir: Path) -> dict[str, Any]:
    """Django's settings for the database of this URL; a relative SQLite path starts at `base_dir`.

    Raises `ImproperlyConfigured` for anything but SQLite and Postgres.
    """
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in SQLITE + POSTGRES:
        raise ImproperlyConfigured(
            f"DATABASE_URL is {without_password(url)!r}, which is neither SQLite nor Postgres. "
            f"Set it to postgres://user:password@host:5432/name or sqlite:///file, "
            f"or unset it for the SQLite file db.sqlite3."
        )
    try:
        config: dict[str, Any] = environ.Env.db_url_config(url)
    except ValueError as error:
        raise ImproperlyConfigured(
            f"DATABASE_URL is {without_password(url)!r}, which cannot be read. The port must be a "
            f"number, and special characters of the user and the password percent-encoded."
        ) from error
    return _sqlite(config, base_dir) if scheme in SQLITE else _postgres(config)


def _sqlite(config: dict[str, Any], base_dir: Path) -> dict[str, Any]:
    if config["NAME"] != ":memory:":
        config["NAME"] = str(base_dir / config["NAME"])
    config["OPTIONS"] = {
        # A read that turns into a write would fail at once, whatever the timeout.
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL;",
    }
    return config


def _postgres(config: dict[str, Any]) -> dict[str, Any]:
    config["CONN_MAX_AGE"] = None
    config["CONN_HEALTH_CHECKS"] = True
    options = config.setdefault("OPTIONS", {})
    options.setdefault("options", "-c lock_timeout=5s -c idle_in_transaction_session_timeout=60s")
    return config


def without_password(url: str) -> str:
    """The URL as it may be shown: no password, however badly encoded, and no query."""
    return re.sub(r"://([^:@]*):.*@", r"://\1:***@", url, flags=re.DOTALL).partition("?")[0]


def check_reachable() -> None:
    """Raises `UnusableError`, in one sentence, unless the database answers now."""
    try:
        connection.ensure_connection()
    except DatabaseError as error:
        raise UnusableError(
            f"The database {without_password(settings.DATABASE_URL)} cannot be reached "
            f"({_first_line(error)}). Start it or correct DATABASE_URL; "
            f"without DATABASE_URL the project uses the SQLite file db.sqlite3."
        ) from error


def check_migrated(table: str) -> None:
    """Raises `UnusableError`, in one sentence, unless this table exists."""
    if table not in connection.introspection.table_names():
        raise UnusableError(
            f"The database {without_password(settings.DATABASE_URL)} has no table {table}. "
            f"Run 'python manage.py migrate' first."
        )


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return " ".join(line.split()) or type(error).__name__
