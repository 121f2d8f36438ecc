"""What the engine executed for one order, executed again by psycopg alone.

The statements are recorded, not written down, so that the comparison cannot fall behind the
engine. For each further order the ids in the parameters are replaced beforehand, so that the
same rows are written in the same way, and the loop has nothing to do but to execute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
from django.db import connection

from benchmarks.process import Process


@dataclass(frozen=True)
class Statement:
    sql: str
    params: Any
    in_transaction: bool
    returns_rows: bool


Delivery = list[Statement]


@dataclass
class Recording:
    """One order: how it was placed, and each of its deliveries."""

    placing: Delivery = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)

    def for_another_order(self) -> Recording:
        """The same, with a new id for every id, wherever in a parameter it stands."""
        everything = [self.placing, *self.deliveries]
        ids = {id for part in everything for statement in part for id in _ids(statement.params)}
        new = {id: uuid4() for id in ids}
        texts = {str(id): str(new[id]) for id in ids}
        placing, *deliveries = (
            [replace(s, params=_replaced(s.params, new, texts)) for s in part]
            for part in everything
        )
        return Recording(placing, deliveries)


def record(process: Process) -> Recording:
    """Let the engine fulfil one order, and keep what it executes."""
    statements: Delivery = []

    def keep(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        returns_rows = context["cursor"].description is not None
        statements.append(Statement(sql, params, connection.in_atomic_block, returns_rows))
        return result

    recording = Recording()
    with connection.execute_wrapper(keep):
        process.place_order()
        recording.placing, statements = statements, []
        while process.deliver_one():
            recording.deliveries.append(statements)
            statements = []
    return recording


def execute(connection: psycopg.Connection[Any], delivery: Delivery) -> None:
    """One delivery, prepared: the claim commits by itself, the rest together."""
    cursor = connection.cursor()
    for statement in delivery:
        if statement.in_transaction and connection.autocommit:
            connection.autocommit = False  # psycopg sends BEGIN before the statement
        cursor.execute(statement.sql, statement.params, prepare=True)
        if statement.returns_rows:
            cursor.fetchall()
    connection.commit()
    connection.autocommit = True


def _ids(value: Any) -> Iterator[UUID]:
    if isinstance(value, UUID):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _ids(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _ids(item)


def _replaced(value: Any, new: dict[UUID, UUID], texts: dict[str, str]) -> Any:
    if isinstance(value, UUID):
        return new[value]
    if isinstance(value, str):
        for old, text in texts.items():
            value = value.replace(old, text)
        return value
    if isinstance(value, dict):
        return {key: _replaced(item, new, texts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, new, texts) for item in value)
    return value
