"""What to say when the database refuses; most of all when its tables are not there."""

from __future__ import annotations

MIGRATE = "Run 'python manage.py migrate'."


def refusal(error: Exception) -> str:
    """The sentence for who ran a command, with the remedy where it is known."""
    said = f"The database refused: {error}".strip()
    # Postgres adds lines that show the statement.
    return f"{said.splitlines()[0].rstrip('.')}. {MIGRATE}" if is_unmigrated(error) else said


def is_unmigrated(error: BaseException) -> bool:
    """Whether a table or a column is missing: an SQLSTATE of Postgres, or the text of SQLite."""
    state = getattr(error.__cause__, "sqlstate", None)
    return state in ("42P01", "42703") or str(error).startswith(("no such table", "no such column"))
