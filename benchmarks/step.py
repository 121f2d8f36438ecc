"""The CPU of one delivery, next to that of a bare psycopg loop: `python -m benchmarks.step`."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psycopg
from django.db.models import Q

from benchmarks import bare
from benchmarks.database import BINDINGS, bare_connection, own_database, wal_position
from benchmarks.process import Process, lean_process
from django_workflows.models import Delivery, Lifecycle, Status
from testproject.orders.models import FulfilmentState


@dataclass(frozen=True)
class Part:
    """What one of the two did in one round, per delivery."""

    cpu_us: float
    wal_bytes: float


@dataclass(frozen=True)
class Round:
    engine: Part
    bare: Part

    @property
    def ratio(self) -> float:
        return self.engine.cpu_us / self.bare.cpu_us


def main() -> None:
    options = parse()
    with own_database(options.binding), lean_process() as process, bare_connection() as connection:
        recording = bare.record(process)
        one_round(0, options.orders, process, recording, connection)  # to warm up
        rounds: list[Round] = []
        until = time.monotonic() + options.seconds
        while time.monotonic() < until or len(rounds) < 3:
            rounds.append(one_round(len(rounds), options.orders, process, recording, connection))
        check(orders=1 + 2 * options.orders * (len(rounds) + 1))
        report = summary(rounds, recording, options, connection)
    print(json.dumps(report) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure (30)")
    parser.add_argument("--orders", type=int, default=20, help="orders per round and part (20)")
    parser.add_argument(
        "--binding",
        choices=BINDINGS,
        default="server",
        help="how Django passes parameters: prepared on the server, or its own default, client",
    )
    return parser.parse_args()


def one_round(
    number: int,
    orders: int,
    process: Process,
    recording: bare.Recording,
    connection: psycopg.Connection[Any],
) -> Round:
    """The same orders by the engine and by the bare loop; they take turns at going first."""

    def by_engine() -> Part:
        for _ in range(orders):
            process.place_order()
        return measured(process.deliver_all, connection)

    def by_bare_loop() -> Part:
        copies = [recording.for_another_order() for _ in range(orders)]
        for copy in copies:
            bare.execute(connection, copy.placing)
        # As the engine does them: the first delivery of every order, then the second.
        deliveries = [d for same in zip(*(c.deliveries for c in copies), strict=True) for d in same]

        def execute_all() -> int:
            for delivery in deliveries:
                bare.execute(connection, delivery)
            return len(deliveries)

        return measured(execute_all, connection)

    if number % 2:
        second, first = by_bare_loop(), by_engine()
        return Round(first, second)
    return Round(by_engine(), by_bare_loop())


def measured(run: Callable[[], int], connection: psycopg.Connection[Any]) -> Part:
    gc.collect()  # neither pays for the other's garbage
    wal = wal_position(connection)
    cpu = time.process_time()
    count = run()
    cpu = time.process_time() - cpu
    return Part(cpu / count * 1e6, (wal_position(connection) - wal) / count)


def check(orders: int) -> None:
    """Both must have brought every order to its end, or the figures compare different work."""
    completed = FulfilmentState.objects.filter(lifecycle=Lifecycle.COMPLETED).count()
    left = Delivery.objects.exclude(Q(status=Status.HANDLED) | Q(status=Status.CANCELLED)).count()
    if completed != orders or left:
        raise SystemExit(f"{completed} of {orders} orders were completed, {left} deliveries left.")


def summary(
    rounds: list[Round],
    recording: bare.Recording,
    options: argparse.Namespace,
    connection: psycopg.Connection[Any],
) -> dict[str, Any]:
    """What is printed. Of each figure the median, lowest and highest of the rounds."""
    deliveries = recording.deliveries
    return {
        "ratio": spread([r.ratio for r in rounds], 2),
        "cpu_us_per_delivery": {
            "engine": spread([r.engine.cpu_us for r in rounds], 0),
            "bare": spread([r.bare.cpu_us for r in rounds], 0),
        },
        "wal_bytes_per_delivery": {
            "engine": spread([r.engine.wal_bytes for r in rounds], 0),
            "bare": spread([r.bare.wal_bytes for r in rounds], 0),
        },
        "statements_per_delivery": round(statistics.mean(map(len, deliveries)), 2),
        "statements": [[s.sql.split(maxsplit=1)[0] for s in delivery] for delivery in deliveries],
        "commits_per_delivery": 2,  # the claim's, and that of everything else
        "rounds": len(rounds),
        "deliveries": len(rounds) * options.orders * len(deliveries),
        "binding": options.binding,
        "versions": {
            "postgres": connection.info.parameter_status("server_version"),
            "python": platform.python_version(),
            **{name: version(name) for name in ("django", "psycopg", "pydantic")},
        },
    }


def spread(values: list[float], digits: int) -> dict[str, float]:
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}


def table(report: dict[str, Any]) -> str:
    def line(name: str, figures: dict[str, float], form: str) -> str:
        return f"{name:34}" + "".join(
            f"{figures[key]:>12{form}}" for key in ("median", "min", "max")
        )

    cpu, wal = report["cpu_us_per_delivery"], report["wal_bytes_per_delivery"]
    return "\n".join(
        [
            f"{'per delivery':34}{'median':>12}{'min':>12}{'max':>12}",
            line("client CPU, engine (us)", cpu["engine"], ",.0f"),
            line("client CPU, bare psycopg (us)", cpu["bare"], ",.0f"),
            line("ratio", report["ratio"], ".2f"),
            line("WAL, engine (bytes)", wal["engine"], ",.0f"),
            line("WAL, bare psycopg (bytes)", wal["bare"], ",.0f"),
            f"{'data statements':34}{report['statements_per_delivery']:>12}",
            f"{'commits':34}{report['commits_per_delivery']:>12}",
            "",
            f"{report['rounds']} rounds, {report['deliveries']:,} deliveries by each; parameters "
            f"bound by the {report['binding']};",
            ", ".join(f"{name} {number}" for name, number in report["versions"].items()),
        ]
    )


if __name__ == "__main__":
    main()
