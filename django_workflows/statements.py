"""The SQL of a delivery's life, one function per transition, for Postgres and SQLite.

Hand-written because every message pays for it: the same statements built as querysets cost
several times the CPU. Each guards its transition in its WHERE clause, so that of two workers
that try the same, one does it and the other is told so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models import Model
from uuid_utils.compat import uuid7

from django_workflows import clock
from django_workflows.models import Delivery

TABLE = f'"{Delivery._meta.db_table}"'

#: A row that the relay handed over is looked at again soon, the later the longer it waits.
LONGEST_SECOND_LOOK = timedelta(minutes=5)


@dataclass(slots=True)
class NewDelivery:
    """A delivery that is about to be inserted; it waits for `at`, which is aware, or `delay`."""

    message_id: UUID
    message_name: str
    body: str
    attributes: str
    sticky_attributes: str
    correlation_id: UUID
    causation_id: UUID | None
    workflow_ids: str
    handler: str
    queue: str
    part: str = ""
    instance_id: UUID | None = None
    sender: str = ""
    sender_instance_id: UUID | None = None
    sender_step: str = ""
    at: datetime | None = None
    delay: timedelta = timedelta(0)
    trace_context: str = ""
    id: UUID = field(default_factory=uuid7)

    @property
    def is_due_now(self) -> bool:
        return self.at is None and not self.delay


class Taken(NamedTuple):
    """A row that the relay, or a consumer of the DatabaseBroker, has just taken."""

    id: UUID
    status: str
    queue: str
    is_due: bool


# From commit to commit


def insert(
    cursor: CursorWrapper, deliveries: Sequence[NewDelivery], *, second_look: timedelta
) -> None:
    """Insert pending rows in the caller's transaction; one that is there already is left alone.

    `second_look` is how long the relay leaves a row that is due now to the hand-over on commit.
    """
    for start in range(0, len(deliveries), ROWS_PER_INSERT):
        batch = deliveries[start : start + ROWS_PER_INSERT]
        values: list[str] = []
        params: list[Any] = []
        for delivery in batch:
            times, time_params = _times(cursor.db, delivery, second_look)
            values.append(f"({_INSERT_VALUES}, {times})")
            params += _adapted(cursor.db, _inserted(delivery))
            params += time_params
        cursor.execute(
            f"INSERT INTO {TABLE} ({_INSERT_COLUMNS}, created_at, due_at, relay_at) "
            f"VALUES {', '.join(values)} ON CONFLICT (message_id, handler, part) DO NOTHING",
            params,
        )


def insert_notes(cursor: CursorWrapper, notes: Sequence[NewDelivery], version: int) -> None:
    """Insert what would undo a step, in its transaction; `version` is what the step led to."""
    is_postgres = cursor.db.vendor == "postgresql"
    now = clock.sql() if is_postgres else "%s"
    times = [] if is_postgres else [*_adapted(cursor.db, [clock.local()])] * 2
    row = f"({_INSERT_VALUES}, {now}, {now}, 'noted', true, %s)"
    params: list[Any] = []
    for note in notes:
        params += (*_adapted(cursor.db, _inserted(note)), *times, version)
    cursor.execute(
        f"INSERT INTO {TABLE} ({_INSERT_COLUMNS}, created_at, due_at, status, undoes, version) "
        f"VALUES {', '.join([row] * len(notes))} "
        f"ON CONFLICT (message_id, handler, part) DO NOTHING",
        params,
    )


def claim(cursor: CursorWrapper, ids: Sequence[UUID], lease: timedelta) -> list[Delivery]:
    """Take pending, due deliveries for this worker; those that another has are not returned.

    Testing `due_at` keeps a late duplicate from running the next attempt before its backoff
    is over. On Postgres the commit does not wait for the disk: a claim lost in a crash of the
    server is a claim that nobody acted on.
    """
    columns = _claimed_columns(cursor.db)
    which: dict[str, Any] = {"id": ids[0]} if len(ids) == 1 else {"ids": list(ids)}
    these = "= %(id)s" if len(ids) == 1 else "{in:ids}"  # an array costs the driver more
    unwaited = ""
    if cursor.db.vendor == "postgresql":
        unwaited = ", set_config('synchronous_commit', 'off', true)"
    rows = _fetch(
        cursor,
        f"UPDATE {TABLE} SET status = 'running', claims = claims + 1, started_at = {{now}}, "
        f"relay_at = {{now+lease}} "
        f"WHERE id {these} AND status = 'pending' AND due_at <= {{now}} "
        f"RETURNING {columns.sql}{unwaited}",
        {**which, "lease": lease},
    )
    return [columns.read(cursor.db, row) for row in rows]


def finish(
    cursor: CursorWrapper,
    delivery: Delivery,
    *,
    status: str,
    reason: str = "",
    instance_id: UUID | None = None,
    step: str = "",
    version: int | None = None,
    changes: str | None = None,
    conflicts: int = 0,
) -> bool:
    """End a running delivery in the transaction of its effects. False: it is no longer ours."""
    return _changed_one(
        cursor,
        f"UPDATE {TABLE} SET status = %(status)s, reason = %(reason)s, step = %(step)s, "
        f"instance_id = %(instance_id)s, version = %(version)s, changes = %(changes)s, "
        f"conflicts = conflicts + %(conflicts)s, ended_at = {{now}}, relay_at = NULL, "
        f"held_up_since = NULL "
        f"WHERE id = %(id)s AND status = 'running' AND claims = %(claims)s",
        {
            "id": delivery.id,
            "claims": delivery.claims,
            "status": status,
            "reason": reason,
            "instance_id": instance_id,
            "step": step,
            "version": version,
            "changes": changes,
            "conflicts": conflicts,
        },
    )


def release(
    cursor: CursorWrapper,
    delivery: Delivery,
    *,
    after: timedelta,
    reason: str,
    conflicts: int = 0,
    held_up: bool = True,
) -> bool:
    """Give a running delivery back, with no attempt used up: the message was not at fault.

    `held_up` says that nothing of it ran, for a conflict or an unknown name: that has a limit.
    """
    since = "COALESCE(held_up_since, {now})" if held_up else "NULL"
    return _changed_one(
        cursor,
        f"UPDATE {TABLE} SET status = 'pending', reason = %(reason)s, due_at = {{now+after}}, "
        f"relay_at = {{now+after}}, conflicts = conflicts + %(conflicts)s, "
        f"held_up_since = {since} "
        f"WHERE id = %(id)s AND status = 'running' AND claims = %(claims)s",
        {
            "id": delivery.id,
            "claims": delivery.claims,
            "after": after,
            "reason": reason,
            "conflicts": conflicts,
        },
    )


def record_failure(
    cursor: CursorWrapper,
    delivery: Delivery,
    *,
    retry_after: timedelta | None,
    failure: str,
    error: str,
    error_class: str,
    traceback: str,
    conflicts: int = 0,
) -> bool:
    """Count a failed attempt; pending again after the backoff, or failed when that is None.

    `failure` is the JSON object that is added to the row's `failures`.
    """
    append = "failures || %(failure)s::jsonb"
    if cursor.db.vendor != "postgresql":
        append = "json_insert(failures, '$[#]', json(%(failure)s))"
    if retry_after is None:
        ending = "status = 'failed', relay_at = NULL, ended_at = {now}"
    else:
        ending = "status = 'pending', due_at = {now+after}, relay_at = {now+after}"
    return _changed_one(
        cursor,
        f"UPDATE {TABLE} SET {ending}, attempts = attempts + 1, failures = {append}, "
        f"error = %(error)s, error_class = %(error_class)s, traceback = %(traceback)s, "
        f"reason = %(error)s, "
        f"conflicts = conflicts + %(conflicts)s, held_up_since = NULL, "
        f"instance_id = %(instance_id)s "
        f"WHERE id = %(id)s AND status = 'running' AND claims = %(claims)s",
        {
            "id": delivery.id,
            "claims": delivery.claims,
            "instance_id": delivery.instance_id,
            "after": retry_after,
            "failure": failure,
            "error": error,
            "error_class": error_class,
            "traceback": traceback,
            "conflicts": conflicts,
        },
    )


def cancel(
    cursor: CursorWrapper,
    *,
    workflows: Sequence[str],
    instance_id: UUID,
    names: Sequence[str] | None,
    kept: Sequence[UUID],
    reason: str,
    with_notes: bool = False,
) -> None:
    """Cancel what this instance has waiting: all for itself, or its messages of these names.

    `workflows` are the stored names of its workflow; `with_notes`, what it has noted to undo too.
    Those of given names may be found by a lookup, so they need not be known to be for itself.

    One that is being run is cancelled too: its worker's finish will then be refused. The caller
    has written the instance's row, so no other step of it can be past that point. `kept` are
    deliveries to leave alone: the one that is being handled, and those sent since.
    """
    which = "AND instance_id = %(instance_id)s"
    if names is not None:
        which = "AND message_name {in:names} AND NOT undoes"
    noted = "OR (sender_instance_id = %(instance_id)s AND status = 'noted') " if with_notes else ""
    _fetch(
        cursor,
        f"UPDATE {TABLE} SET status = 'cancelled', reason = %(reason)s, relay_at = NULL, "
        f"ended_at = {{now}} WHERE (sender_instance_id = %(instance_id)s "
        f"AND sender {{in:workflows}} AND handler {{in:workflows}} {which} "
        f"AND status IN ('pending', 'running') AND NOT (id {{in:kept}})) {noted}"
        f"RETURNING id",
        {
            "instance_id": instance_id,
            "workflows": list(workflows),
            "names": list(names or ()),
            "kept": list(kept),
            "reason": reason,
        },
    )


def arrivals(
    cursor: CursorWrapper,
    *,
    workflows: Sequence[str],
    instance_id: UUID,
    step: str,
    notice_id: UUID,
) -> tuple[dict[str, int], bool]:
    """How many messages of each name have arrived for a join, and whether its notice was sent."""
    rows = _fetch(
        cursor,
        f"SELECT message_name, count(*) FROM {TABLE} WHERE instance_id = %(instance_id)s "
        f"AND handler {{in:workflows}} AND step = %(step)s AND status = 'handled' "
        f"GROUP BY message_name UNION ALL SELECT '', 1 FROM {TABLE} "
        f"WHERE message_id = %(notice_id)s AND handler {{in:workflows}}",
        {
            "workflows": list(workflows),
            "instance_id": instance_id,
            "step": step,
            "notice_id": notice_id,
        },
    )
    counts = dict(rows)
    return counts, bool(counts.pop("", 0))


# The safety net


def extend(cursor: CursorWrapper, held: Mapping[UUID, int], lease: timedelta) -> set[UUID]:
    """Extend the leases of these deliveries, by id and fencing token; the ids still held."""
    pairs = {
        f"{part}_{i}": v
        for i, pair in enumerate(held.items())
        for part, v in zip("ic", pair, strict=True)
    }
    places = ", ".join(f"(%(i_{i})s, %(c_{i})s)" for i in range(len(held)))
    rows = _fetch(
        cursor,
        f"UPDATE {TABLE} SET relay_at = {{now+lease}} "
        f"WHERE status = 'running' AND (id, claims) IN ({places}) RETURNING id",
        {**pairs, "lease": lease},
    )
    return {_uuid(row[0]) for row in rows}


def take_due(
    cursor: CursorWrapper,
    *,
    queue: str,
    limit: int,
    lease: timedelta,
    losses: int,
    backoff: timedelta,
    backoff_factor: float,
    backoff_max: timedelta,
    grows: bool,
    orphans_of: Sequence[str] | None = None,
) -> list[Taken]:
    """Take what is due on a queue, oldest first, and look at it again after the lease.

    With `grows` the second look comes the later the longer a row is overdue, so that a backlog
    never becomes a storm of duplicates. A running row among them has lost its worker: it is
    pending again, after a random backoff from the second loss on, so that the innocent and the
    guilty of a dead process do not meet for ever; or failed, once it lost `losses` workers.
    With `orphans_of`, the rows on none of these queues are taken instead.
    """
    is_postgres = cursor.db.vendor == "postgresql"
    on_queue = "queue = %(queue)s" if orphans_of is None else "NOT (queue {in:queues})"
    second_look = "{now+lease}"
    if is_postgres and grows:
        second_look = "{now} + GREATEST(%(lease)s, LEAST({now} - due_at, %(longest)s))"
    # Of random size, and the same in both columns: it comes from the row and its losses.
    if is_postgres:
        retry_at = (
            "{now} + CASE losses WHEN 0 THEN interval '0' ELSE interval '1 second' * "
            "LEAST(%(backoff_max_s)s, %(backoff_s)s * power(%(factor)s::float8, "
            "LEAST(losses - 1, 100)) * (hashtext(id::text || losses) & 1023) / 512) END"
        )
    else:
        retry_at = (
            "CASE losses WHEN 0 THEN {now} ELSE strftime('%%Y-%%m-%%d %%H:%%M:%%f', {now}, "
            "printf('%%+.3f seconds', MIN(%(backoff_max_s)s, %(backoff_s)s * "
            "power(%(factor)s, losses - 1) * ((rowid * 567 + losses * 315) & 1023) / 512))) END"
        )
    lock = "FOR UPDATE SKIP LOCKED" if is_postgres else ""
    due = (
        f"SELECT id FROM {TABLE} WHERE {on_queue} AND relay_at <= {{now}} "
        f"ORDER BY relay_at LIMIT %(limit)s {lock}"
    )
    # An array, since a plan that hashes IN (SELECT ...) may update far more than the limit.
    these = f"= ANY(ARRAY({due}))" if is_postgres else f"IN ({due})"
    lost, last = "status = 'running'", "losses + 1 >= %(losses)s"
    died = "'Its worker died ' || (losses + 1) || ' times.'"
    rows = _fetch(
        cursor,
        f"UPDATE {TABLE} SET "
        f"status = CASE WHEN {lost} AND {last} THEN 'failed' ELSE 'pending' END, "
        f"due_at = CASE WHEN {lost} THEN {retry_at} ELSE due_at END, "
        f"relay_at = CASE WHEN {lost} AND {last} THEN NULL "
        f"WHEN {lost} AND losses > 0 THEN {retry_at} ELSE {second_look} END, "
        f"ended_at = CASE WHEN {lost} AND {last} THEN {{now}} END, "
        f"reason = CASE WHEN {lost} AND {last} THEN {died} "
        f"WHEN {lost} THEN 'Its worker died or was stopped.' ELSE reason END, "
        f"error = CASE WHEN {lost} AND {last} THEN {died} ELSE error END, "
        f"error_class = CASE WHEN {lost} AND {last} THEN 'WorkerDied' ELSE error_class END, "
        f"losses = losses + CASE WHEN {lost} THEN 1 ELSE 0 END "
        f"WHERE id {these} "
        f"RETURNING id, status, queue, status = 'pending' AND due_at <= {{now}}",
        {
            "queue": queue,
            "queues": list(orphans_of or ()),
            "limit": limit,
            "lease": lease,
            "longest": LONGEST_SECOND_LOOK,
            "losses": losses,
            "factor": backoff_factor,
            "backoff_s": backoff.total_seconds(),
            "backoff_max_s": backoff_max.total_seconds(),
        },
    )
    return [Taken(_uuid(row[0]), row[1], row[2], bool(row[3])) for row in rows]


def is_any_due(
    cursor: CursorWrapper, *, queue: str, orphans_of: Sequence[str] | None = None
) -> bool:
    """Whether `take_due` may find anything: on SQLite it would take the one write lock to look."""
    if cursor.db.vendor == "postgresql":
        return True
    on_queue = "queue = %(queue)s" if orphans_of is None else "NOT (queue {in:queues})"
    sql = f"SELECT 1 FROM {TABLE} WHERE {on_queue} AND relay_at <= {{now}} LIMIT 1"
    return bool(_fetch(cursor, sql, {"queue": queue, "queues": list(orphans_of or ())}))


def make_due_now(cursor: CursorWrapper, ids: Sequence[UUID]) -> None:
    """Let another consumer take these pending rows at once."""
    _fetch(
        cursor,
        f"UPDATE {TABLE} SET relay_at = {{now}} WHERE id {{in:ids}} AND status = 'pending' "
        f"RETURNING id",
        {"ids": list(ids)},
    )


# Rows into instances


class Columns:
    """Some columns of a model: their SQL, and how a row of them becomes an instance."""

    def __init__(
        self, connection: BaseDatabaseWrapper, model: type[Model], names: Sequence[str]
    ) -> None:
        # In the model's order, which is the one that from_db() expects.
        fields: list[Any] = [f for f in model._meta.concrete_fields if f.name in names]
        columns = [f.get_col(model._meta.db_table) for f in fields]
        self.model = model
        self.names = dict.fromkeys(f.attname for f in fields)  # in order, and quick to look up in
        self.sql = ", ".join(connection.ops.quote_name(f.column) for f in fields)
        self.converters = [
            (place, converter, column)
            for place, column in enumerate(columns)
            for converter in (
                *connection.ops.get_db_converters(column),
                *column.get_db_converters(connection),
            )
        ]

    def read(self, connection: BaseDatabaseWrapper, row: Sequence[Any]) -> Any:
        """The instance, as the ORM would have loaded it."""
        values = list(row[: len(self.names)])
        for place, converter, column in self.converters:
            values[place] = converter(values[place], column, connection)
        return self.model.from_db(connection.alias, self.names, values)


CLAIMED = (
    "id",
    "message_id",
    "message_name",
    "body",
    "attributes",
    "sticky_attributes",
    "correlation_id",
    "causation_id",
    "workflow_ids",
    "trace_context",
    "handler",
    "part",
    "instance_id",
    "sender",
    "sender_instance_id",
    "sender_step",
    "queue",
    "status",
    "claims",
    "attempts",
    "losses",
    "due_at",
    "started_at",
    "held_up_since",
    "undoes",
    "waits_for",
)


_claimed: dict[str, Columns] = {}


def _claimed_columns(connection: BaseDatabaseWrapper) -> Columns:
    if connection.alias not in _claimed:
        _claimed[connection.alias] = Columns(connection, Delivery, CLAIMED)
    return _claimed[connection.alias]


# Dialects


def _fetch(cursor: CursorWrapper, template: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement that returns rows, and fetch them all (SQLite wants that)."""
    cursor.execute(*_in_dialect(cursor.db, template, params))
    rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _changed_one(cursor: CursorWrapper, template: str, params: dict[str, Any]) -> bool:
    cursor.execute(*_in_dialect(cursor.db, template, params))
    return bool(cursor.rowcount == 1)


_TOKEN = re.compile(r"\{(now|in)(?:[+:](\w+))?\}")


def _in_dialect(
    connection: BaseDatabaseWrapper, template: str, params: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Fill in `{now}`, `{now+lease}` and `{in:ids}` as this database wants them."""
    if connection.vendor == "postgresql":
        return _postgres(template, clock.sql()), params
    return _sqlite(connection, template, params)


@lru_cache(maxsize=128)
def _postgres(template: str, now: str) -> str:
    def fill(token: re.Match[str]) -> str:
        kind, name = token.groups()
        if kind == "in":
            return f"= ANY(%({name})s)"
        return f"({now} + %({name})s)" if name else now

    return _TOKEN.sub(fill, template)


def _sqlite(
    connection: BaseDatabaseWrapper, template: str, params: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    now = clock.local()
    used: dict[str, Any] = {}

    def fill(token: re.Match[str]) -> str:
        kind, name = token.groups()
        if kind == "in":
            places = {f"{name}_{i}": value for i, value in enumerate(params[name])}
            used.update(places)
            return f"IN ({', '.join(f'%({place})s' for place in places)})"
        used[f"now_{name or ''}"] = now + params[name] if name else now
        return f"%(now_{name or ''})s"

    sql = _TOKEN.sub(fill, template)
    used.update({name: value for name, value in params.items() if f"%({name})s" in sql})
    return sql, dict(zip(used, _adapted(connection, used.values()), strict=True))


def _adapted(connection: BaseDatabaseWrapper, values: Iterable[Any]) -> Iterable[Any]:
    """Values as the driver of this database takes them."""
    if connection.vendor == "postgresql":
        return values
    return [_for_sqlite(connection, value) for value in values]


def _for_sqlite(connection: BaseDatabaseWrapper, value: Any) -> Any:
    if isinstance(value, UUID):
        return value.hex
    if isinstance(value, datetime):
        return connection.ops.adapt_datetimefield_value(value)
    return value


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


# One row of INSERT

ROWS_PER_INSERT = 500
_INSERT_NAMES = (
    "id",
    "message_id",
    "message_name",
    "body",
    "attributes",
    "sticky_attributes",
    "correlation_id",
    "causation_id",
    "workflow_ids",
    "trace_context",
    "handler",
    "part",
    "instance_id",
    "sender",
    "sender_instance_id",
    "sender_step",
    "queue",
)
_inserted = attrgetter(*_INSERT_NAMES)
_INSERT_COLUMNS = ", ".join(_INSERT_NAMES)
_INSERT_VALUES = ", ".join(["%s"] * len(_INSERT_NAMES))


def _times(
    connection: BaseDatabaseWrapper, delivery: NewDelivery, second_look: timedelta
) -> tuple[str, Iterable[Any]]:
    """SQL and parameters of created_at, due_at and relay_at."""
    if connection.vendor == "postgresql":
        now = clock.sql()
        if delivery.is_due_now:
            return f"{now}, {now}, {now} + %s", [second_look]
        due = f"GREATEST(COALESCE(%s::timestamptz, {now}), {now} + %s)"
        return f"{now}, {due}, {due}", [delivery.at, delivery.delay] * 2
    now_ = clock.local()
    due_ = max(delivery.at or now_, now_ + delivery.delay)
    look = due_ + second_look if delivery.is_due_now else due_
    moments = [moment.astimezone(UTC) for moment in (now_, due_, look)]
    return "%s, %s, %s", _adapted(connection, moments)
