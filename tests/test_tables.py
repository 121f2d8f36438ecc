"""Where the tables are missing, the remedy is named; and a batch is summed up in one sentence."""

import logging
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from django_workflows.broker import _closed
from django_workflows.tables import refusal
from django_workflows.workers import Presence
from testproject.orders.management.batch_command import in_words

pytestmark = pytest.mark.django_db

REMEDY = "Run 'python manage.py migrate'."


def refused(sql: str) -> Exception:
    with (
        pytest.raises(DatabaseError) as caught,
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(sql)
    return caught.value


def test_a_missing_table_or_column_names_the_remedy() -> None:
    for sql in ("SELECT * FROM nowhere", "SELECT absent FROM django_workflows_delivery"):
        assert refusal(refused(sql)).endswith(REMEDY)
        assert REMEDY in str(_closed(refused(sql)))


def test_another_refusal_does_not() -> None:
    assert REMEDY not in refusal(refused("SELECT FROM WHERE"))
    assert refusal(DatabaseError()) == "The database refused:"


def test_a_worker_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = refused("SELECT * FROM nowhere")

    def write(presence: Presence) -> None:
        raise error

    monkeypatch.setattr(Presence, "_write", write)
    with caplog.at_level(logging.WARNING):
        Presence([], relays=True).say()

    (record,) = caplog.records
    assert record.getMessage().endswith(REMEDY)
    assert not record.exc_info


def test_a_batch_in_one_sentence() -> None:
    summary: dict[str, Any] = {
        "orders": 100, "completed": 94, "declined": 6, "compensated": 0, "unfinished": 0,
    }  # fmt: skip

    assert in_words(summary) == "100 of 100 orders are accounted for: 94 completed, 6 declined."
