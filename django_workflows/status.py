"""How things stand: what the command workflows_status prints, and the admin's overview shows.

It stays cheap however many rows there are: counts end at a bound, and what goes beyond is
estimated from the statistics of the database, or said to be a minimum. A few statements in all,
whatever the number of workflows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from django_workflows import clock, conf, registry, workers
from django_workflows.declarations import Recipient as AnyRecipient
from django_workflows.declarations import WorkflowDefinition
from django_workflows.models import Delivery, Lifecycle, Status, Worker
from django_workflows.statements import LONGEST_SECOND_LOOK, TABLE

#: Rows that are counted; of more, the number is an estimate, or a minimum.
BOUND = 10_000
#: Rows of one bar of a chart that are counted; of more, the rate at its beginning is drawn on.
BAR_BOUND = 10_000
MINUTES = 30
HOURS = 24
#: A delivery that has been due for longer is overdue.
OVERDUE_AFTER = timedelta(seconds=60)
#: SELECTs that one statement puts together; SQLite takes 500.
SELECTS = 400
#: Pages of the table that are read for an estimate of what its statistics do not tell.
SAMPLED_PAGES = 2_000

#: A SELECT and its parameters.
Part = tuple[str, list[Any]]
#: Gives the name under which deliveries to a handler are shown; None: they are not.
NameOf = Callable[[str], str | None]


@dataclass(frozen=True)
class Figure:
    """A number, and whether it was counted."""

    value: int = 0
    #: It was not counted: it may be a little more or less.
    is_estimate: bool = False
    #: It was not counted to the end: there are at least so many.
    is_minimum: bool = False

    def __str__(self) -> str:
        return f"{'~' * self.is_estimate}{self.value:,}{'+' * self.is_minimum}"

    def __add__(self, other: Figure) -> Figure:
        return Figure(
            self.value + other.value,
            self.is_estimate or other.is_estimate,
            self.is_minimum or other.is_minimum,
        )


@dataclass(frozen=True)
class Bar:
    """How many deliveries were handled, and have failed for good, from `start` on."""

    start: datetime
    handled: Figure = Figure()
    failed: Figure = Figure()


@dataclass
class Backlog:
    """Deliveries to one handler or workflow that have not been handled."""

    #: Not due yet: delays, timeouts, backoff.
    waiting: Figure = Figure()
    #: Due, and not taken by a worker yet; the overdue ones included.
    due: Figure = Figure()
    #: Due for longer than a limit.
    overdue: Figure = Figure()
    running: Figure = Figure()
    failed: Figure = Figure()
    #: Since when the oldest due delivery has been due.
    oldest_due_at: datetime | None = None

    def __add__(self, other: Backlog) -> Backlog:
        oldest = [at for at in (self.oldest_due_at, other.oldest_due_at) if at]
        return Backlog(
            self.waiting + other.waiting,
            self.due + other.due,
            self.overdue + other.overdue,
            self.running + other.running,
            self.failed + other.failed,
            min(oldest, default=None),
        )


@dataclass
class Recipient:
    """A plain handler, or whatever else deliveries go to."""

    name: str
    backlog: Backlog = field(default_factory=Backlog)
    #: The last minutes and hours, oldest first; the last bar is not over yet.
    minutes: list[Bar] = field(default_factory=list)
    hours: list[Bar] = field(default_factory=list)


@dataclass
class Workflow(Recipient):
    """A workflow and its instances."""

    #: How many there are in each state of their life.
    instances: dict[Lifecycle, Figure] = field(default_factory=dict)
    #: The running instance that was started first.
    oldest_running_id: UUID | None = None
    oldest_running_at: datetime | None = None


@dataclass
class Overview:
    """How things stood at one moment."""

    at: datetime
    workflows: list[Workflow]
    #: Plain handlers, then what is not declared any more and still has deliveries.
    handlers: list[Recipient]
    #: Everything together.
    backlog: Backlog
    minutes: list[Bar]
    hours: list[Bar]
    #: The processes that have been there in the last day, the latest seen first.
    workers: list[Worker]

    @property
    def workers_seen_lately(self) -> list[Worker]:
        """Those that handle deliveries."""
        return [worker for worker in self._seen_lately() if worker.queues]

    @property
    def relays_seen_lately(self) -> list[Worker]:
        """Those that look for what is due: delays, retries and lost work depend on them."""
        return [worker for worker in self._seen_lately() if worker.relays]

    def _seen_lately(self) -> list[Worker]:
        return [w for w in self.workers if self.at - w.seen_at < workers.SEEN_LATELY]

    def age(self, moment: datetime | None) -> timedelta | None:
        """How long ago the moment was; None of None."""
        return None if moment is None else max(self.at - moment, timedelta(0))


def overview(
    *,
    workflows: Sequence[WorkflowDefinition] | None = None,
    overdue_after: timedelta = OVERDUE_AFTER,
    charts: bool = True,
) -> Overview:
    """How things stand, of everything or of these workflows; read where deliveries are read.

    At most eight statements, however many workflows and rows there are.
    """
    connection = connections[router.db_for_read(Delivery)]
    now, queues = read_queues(connection)
    definitions = list(registry.current().workflows if workflows is None else workflows)
    shown = [Workflow(definition.name) for definition in definitions]
    add_instances(connection, definitions, shown)
    plain = registry.current().handlers if workflows is None else []
    everybody: list[AnyRecipient] = [*definitions, *plain]
    names = {alias: one.name for one in everybody for alias in (one.name, *one.aliases)}

    def name_of(handler: str) -> str | None:
        """The name under which deliveries to it are shown; None: they are not."""
        return names.get(handler, handler if workflows is None else None)

    backlogs = read_backlogs(connection, now, queues, overdue_after, name_of)
    charted = read_charts(connection, now, name_of) if charts else {}
    known = dict.fromkeys((*(w.name for w in shown), *(handler.name for handler in plain)))
    gone = sorted({*backlogs, *charted} - known.keys())
    others = [Recipient(name) for name in (*(handler.name for handler in plain), *gone)]
    minutes, hours = empty_charts(now) if charts else ([], [])
    everything: list[Recipient] = [*shown, *others]
    for recipient in everything:
        recipient.backlog = backlogs.get(recipient.name, Backlog())
        recipient.minutes, recipient.hours = charted.get(recipient.name, (minutes, hours))
    return Overview(
        at=now,
        workflows=shown,
        handlers=others,
        backlog=sum((recipient.backlog for recipient in everything), Backlog()),
        minutes=summed(minutes, [recipient.minutes for recipient in everything]),
        hours=summed(hours, [recipient.hours for recipient in everything]),
        workers=list(Worker.objects.using(connection.alias).order_by("-seen_at")[:1000]),
    )


def summed(empty: Sequence[Bar], rows: Iterable[Sequence[Bar]]) -> list[Bar]:
    """One row of bars that adds up all of these."""
    total = list(empty)
    for row in rows:
        total = [
            Bar(so_far.start, so_far.handled + bar.handled, so_far.failed + bar.failed)
            for so_far, bar in zip(total, row, strict=True)
        ]
    return total


# Instances


def add_instances(
    connection: BaseDatabaseWrapper,
    definitions: Sequence[WorkflowDefinition],
    shown: Sequence[Workflow],
) -> None:
    """Count the instances of each workflow by their lifecycle, and find the oldest running one."""
    tables = [definition.state._meta.db_table for definition in definitions]
    counted, oldest = _counted_instances(connection, tables)
    estimated: dict[tuple[str, str], int] = {}
    if any(count > BOUND for count in counted.values()):
        estimated = _estimated_instances(connection, tables)
        busy = [table for table in tables if counted.get((table, Lifecycle.RUNNING), 0) > BOUND]
        oldest.update(_oldest_of_many(connection, busy))
    for workflow, table in zip(shown, tables, strict=True):
        workflow.instances = {
            lifecycle: bounded(
                counted.get((table, lifecycle), 0), estimated.get((table, lifecycle))
            )
            for lifecycle in Lifecycle
        }
        workflow.oldest_running_id, workflow.oldest_running_at = oldest.get(table, (None, None))


def bounded(count: int, estimate: int | None = None) -> Figure:
    """What a count that ended after the bound says, with an estimate if there is one."""
    if count <= BOUND:
        return Figure(count)
    if estimate is not None and estimate > BOUND:
        return Figure(estimate, is_estimate=True)
    return Figure(BOUND, is_estimate=True, is_minimum=True)


Oldest = dict[str, tuple[UUID, datetime]]


def _counted_instances(
    connection: BaseDatabaseWrapper, tables: Sequence[str]
) -> tuple[dict[tuple[str, str], int], Oldest]:
    """Instances by table and lifecycle, each counted up to the bound; the oldest running one.

    That is the oldest of those that were counted. The index of lifecycle finds them; by the
    primary key all the ended ones before them would be read.
    """
    nobody = "NULL, NULL"
    if connection.vendor == "postgresql":
        nobody = "NULL::uuid, NULL::timestamptz"
    parts: list[Part] = []
    for place, table in enumerate(tables):
        origin = f"FROM {connection.ops.quote_name(table)} WHERE lifecycle ="
        for lifecycle in Lifecycle:
            some = f"SELECT 1 {origin} '{lifecycle}' LIMIT {BOUND + 1}"
            sql = f"SELECT {place}, '{lifecycle}', COUNT(*), {nobody} FROM ({some}) AS counted"
            parts.append((sql, []))
        some = f"SELECT id, started_at {origin} 'running' LIMIT {BOUND + 1}"
        first = f"SELECT * FROM ({some}) AS running ORDER BY id LIMIT 1"
        parts.append((f"SELECT {place}, '', 0, id, started_at FROM ({first}) AS oldest", []))
    counted: dict[tuple[str, str], int] = {}
    oldest: Oldest = {}
    for place, lifecycle, count, pk, at in fetch(connection, parts):
        if lifecycle:
            counted[tables[place], lifecycle] = count
        else:
            oldest[tables[place]] = as_uuid(pk), as_moment(connection, at)
    return counted, oldest


def _oldest_of_many(connection: BaseDatabaseWrapper, tables: Sequence[str]) -> Oldest:
    """Of tables with very many running instances, the one that was started first."""
    parts: list[Part] = []
    for place, table in enumerate(tables):
        first = (
            f"SELECT id, started_at FROM {connection.ops.quote_name(table)} "
            f"WHERE lifecycle = 'running' ORDER BY id LIMIT 1"
        )
        parts.append((f"SELECT {place}, id, started_at FROM ({first}) AS oldest", []))
    return {
        tables[place]: (as_uuid(pk), as_moment(connection, at))
        for place, pk, at in fetch(connection, parts)
    }


def _estimated_instances(
    connection: BaseDatabaseWrapper, tables: Sequence[str]
) -> dict[tuple[str, str], int]:
    """What Postgres knows since its last ANALYZE of how often each lifecycle is there."""
    if connection.vendor != "postgresql":
        return {}
    sql = """
        SELECT s.tablename, v.lifecycle, (GREATEST(c.reltuples, 0) * v.share)::bigint
        FROM pg_stats AS s
        JOIN pg_class AS c ON c.oid = to_regclass(quote_ident(s.tablename))
        JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = s.schemaname
        CROSS JOIN LATERAL unnest(s.most_common_vals::text::text[], s.most_common_freqs)
            AS v (lifecycle, share)
        WHERE s.attname = 'lifecycle' AND s.tablename = ANY(%s)
    """
    rows = fetch(connection, [(sql, [list(tables)])])
    return {(table, lifecycle): count for table, lifecycle, count in rows}


# Deliveries that are not handled


def read_queues(connection: BaseDatabaseWrapper) -> tuple[datetime, list[str]]:
    """The time, and the queues that have unended deliveries, read by leaps through their index."""
    now = clock.sql() if connection.vendor == "postgresql" else "NULL"
    sql = f"""
        WITH RECURSIVE leap (queue) AS (
            SELECT MIN(queue) FROM {TABLE} WHERE relay_at IS NOT NULL
            UNION ALL
            SELECT (SELECT MIN(queue) FROM {TABLE}
                WHERE relay_at IS NOT NULL AND queue > leap.queue)
            FROM leap WHERE leap.queue IS NOT NULL
        )
        SELECT queue, {now} FROM leap
    """
    rows = fetch(connection, [(sql, [])])
    return rows[0][1] or clock.local(), [queue for queue, _now in rows if queue is not None]


def read_backlogs(
    connection: BaseDatabaseWrapper,
    now: datetime,
    queues: Sequence[str],
    overdue_after: timedelta,
    name_of: NameOf,
) -> dict[str, Backlog]:
    """The backlog of each handler and workflow, by name."""
    kinds = kinds_of(now, overdue_after)
    counted = _counted_deliveries(connection, queues, kinds)
    beyond = {k: kinds[k] for k, rows in counted.items() if sum(r[1] for r in rows) > BOUND}
    sampled = _sampled_deliveries(connection, beyond)
    backlogs: dict[str, Backlog] = {}
    for kind, rows in counted.items():
        seen = {handler: (count, oldest) for handler, count, oldest in rows}
        for handler in {*seen, *sampled.get(kind, {})}:
            if (name := name_of(handler)) is None:
                continue
            count, oldest = seen.get(handler, (0, None))
            figure = Figure(count)
            if kind in beyond:
                estimate = sampled.get(kind, {}).get(handler, 0)
                figure = Figure(max(estimate, count), True, is_minimum=estimate <= count)
            backlog = backlogs.setdefault(name, Backlog())
            setattr(backlog, kind, getattr(backlog, kind) + figure)
            if kind == "due" and oldest is not None:
                due_at = as_moment(connection, oldest)
                backlog.oldest_due_at = min(backlog.oldest_due_at or due_at, due_at)
    return backlogs


@dataclass(frozen=True)
class Kind:
    """What tells deliveries of one kind, in SQL; `reach` finds them in an index."""

    where: str
    params: tuple[datetime, ...] = ()
    reach: str = ""
    reach_params: tuple[datetime, ...] = ()


def kinds_of(now: datetime, overdue_after: timedelta) -> dict[str, Kind]:
    """What is due is looked at again by the relay soon: its index need not be read to the end."""
    soon = now + LONGEST_SECOND_LOOK + conf.current().LEASE
    pending = "relay_at IS NOT NULL AND status = 'pending' AND due_at"
    running = "relay_at IS NOT NULL AND status = 'running'"
    return {
        "waiting": Kind(f"{pending} > %s", (now,), "relay_at > %s", (now,)),
        "due": Kind(f"{pending} <= %s", (now,), "relay_at <= %s", (soon,)),
        "overdue": Kind(f"{pending} <= %s", (now - overdue_after,), "relay_at <= %s", (soon,)),
        "running": Kind(running, (), "relay_at <= %s", (soon,)),
        "failed": Kind("status = 'failed'"),
    }


def _counted_deliveries(
    connection: BaseDatabaseWrapper, queues: Sequence[str], kinds: dict[str, Kind]
) -> dict[str, list[tuple[str, int, Any]]]:
    """Of each kind the deliveries by handler, up to the bound; since when the oldest is due."""
    parts: list[Part] = []
    places = ", ".join(["%s"] * len(queues))
    for name, kind in kinds.items():
        where = kind.where
        params: list[Any] = list(kind.params)
        if kind.reach and not queues:
            continue
        if kind.reach:
            where = f"queue IN ({places}) AND {kind.reach} AND {where}"
            params = [*queues, *kind.reach_params, *params]
        some = f"SELECT handler, due_at FROM {TABLE} WHERE {where} LIMIT {BOUND + 1}"
        sql = f"SELECT '{name}', handler, COUNT(*), MIN(due_at) FROM ({some}) AS counted"
        parts.append((f"{sql} GROUP BY handler", params))
    found: dict[str, list[tuple[str, int, Any]]] = {name: [] for name in kinds}
    for name, handler, count, oldest in fetch(connection, parts):
        found[name].append((handler, count, oldest))
    return found


def _sampled_deliveries(
    connection: BaseDatabaseWrapper, kinds: dict[str, Kind]
) -> dict[str, dict[str, int]]:
    """How many deliveries of these kinds each handler has, judged by some pages of the table."""
    if not kinds or connection.vendor != "postgresql":
        return {}
    pages = f"(pg_relation_size('{TABLE}') / current_setting('block_size')::float)"
    share = f"LEAST(1.0, {SAMPLED_PAGES} / GREATEST({pages}, 1.0))"
    parts = [
        (
            f"SELECT '{name}', handler, (COUNT(*) / {share})::bigint FROM {TABLE} "
            f"TABLESAMPLE SYSTEM (100 * {share}) WHERE {kind.where} GROUP BY handler",
            list(kind.params),
        )
        for name, kind in kinds.items()
    ]
    found: dict[str, dict[str, int]] = {name: {} for name in kinds}
    for name, handler, count in fetch(connection, parts):
        found[name][handler] = count
    return found


# Charts


#: How long a bar is, and how many there are.
CHARTS = ((timedelta(minutes=1), MINUTES), (timedelta(hours=1), HOURS))


def empty_charts(now: datetime) -> tuple[list[Bar], list[Bar]]:
    """The bars of the last minutes, and those of the last hours, with nothing in them."""
    minutes, hours = ([Bar(start) for start in starts_of(now, *chart)] for chart in CHARTS)
    return minutes, hours


def starts_of(now: datetime, length: timedelta, count: int) -> list[datetime]:
    """When each of the last bars begins, oldest first; now is in the last."""
    seconds = int(length.total_seconds())
    last = int(now.timestamp()) // seconds * seconds
    return [datetime.fromtimestamp(last - seconds * n, UTC) for n in range(count - 1, -1, -1)]


def read_charts(
    connection: BaseDatabaseWrapper, now: datetime, name_of: NameOf
) -> dict[str, tuple[list[Bar], list[Bar]]]:
    """The bars of minutes and of hours of each handler and workflow, by name.

    Of a busy bar the first deliveries are counted, and the rest is drawn on at their rate.
    """
    parts: list[Part] = []
    for which, (length, count) in enumerate(CHARTS):
        for place, start in enumerate(starts_of(now, length, count)):
            for status in (Status.HANDLED, Status.FAILED):
                some = (
                    f"SELECT handler, ended_at FROM {TABLE} WHERE status = '{status}' AND "
                    f"ended_at >= %s AND ended_at < %s ORDER BY ended_at LIMIT {BAR_BOUND + 1}"
                )
                sql = f"SELECT {which}, {place}, '{status}', handler, COUNT(*), MAX(ended_at)"
                sql = f"{sql} FROM ({some}) AS counted GROUP BY handler"
                parts.append((sql, [start, start + length]))
    groups: dict[tuple[int, int, str], list[tuple[str, int, datetime]]] = {}
    for which, place, ended_as, handler, count, last in fetch(connection, parts):
        row = (handler, count, as_moment(connection, last))
        groups.setdefault((which, place, ended_as), []).append(row)
    charts: dict[str, tuple[list[Bar], list[Bar]]] = {}
    for (which, place, ended_as), rows in groups.items():
        length, bars_shown = CHARTS[which]
        start = starts_of(now, length, bars_shown)[place]
        for handler, figure in drawn_on(rows, start, min(start + length, now)):
            if (name := name_of(handler)) is not None:
                bars = charts.setdefault(name, empty_charts(now))[which]
                key = "handled" if ended_as == Status.HANDLED else "failed"
                bars[place] = replace(bars[place], **{key: getattr(bars[place], key) + figure})
    return charts


def drawn_on(
    rows: Sequence[tuple[str, int, datetime]], start: datetime, end: datetime
) -> list[tuple[str, Figure]]:
    """The deliveries of one bar by handler: as counted, or at the rate of those up to the bound."""
    if sum(count for _handler, count, _last in rows) <= BAR_BOUND:
        return [(handler, Figure(count)) for handler, count, _last in rows]
    counted_to = max(last for _handler, _count, last in rows)
    factor = max((end - start) / max(counted_to - start, timedelta(milliseconds=1)), 1.0)
    return [
        (handler, Figure(round(count * factor), is_estimate=True)) for handler, count, _last in rows
    ]


# Statements


def fetch(connection: BaseDatabaseWrapper, parts: Sequence[Part]) -> list[tuple[Any, ...]]:
    """The rows of all of these SELECTs, in one statement, or few if there are very many."""
    rows: list[tuple[Any, ...]] = []
    with connection.cursor() as cursor:
        for start in range(0, len(parts), SELECTS):
            some = parts[start : start + SELECTS]
            sql = " UNION ALL ".join(sql for sql, _params in some)
            params = [adapted(connection, value) for _sql, own in some for value in own]
            cursor.execute(sql, params)
            rows += cursor.fetchall()
    return rows


def adapted(connection: BaseDatabaseWrapper, value: Any) -> Any:
    """A parameter as the driver of this database takes it."""
    if isinstance(value, datetime):
        return connection.ops.adapt_datetimefield_value(value)
    return value


def as_uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


def as_moment(connection: BaseDatabaseWrapper, value: Any) -> datetime:
    """A time that was read: SQLite gives a text, in UTC."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    moment: datetime = value if timezone.is_aware(value) else value.replace(tzinfo=UTC)
    return moment
