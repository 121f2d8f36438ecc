"""Many answers to one instance, joined and counted: `python -m benchmarks.joins`.

The same answers arrive on the same threads, once at a workflow that joins them and once at one
that counts them in its state, round after round, in one run on one database.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from uuid import UUID, uuid4

from django.db import connection, connections
from django.db.models import Sum

from benchmarks.database import BINDINGS, own_database
from benchmarks.step import spread
from django_workflows import (
    Event,
    Workflow,
    dispatch,
    outbox,
    publish,
    relay,
    started_by,
    when,
    when_all,
)
from django_workflows.models import UNENDED, Delivery, Lifecycle, Status
from django_workflows.testing import isolated_registry
from testproject.orders.models import BatchOrderState

SIDES = ("when_all", "counter")

#: Seconds after which a round is given up.
LIMIT = 300.0


class Asked(Event, name="benchmarks.Asked"):
    batch_id: UUID
    answers: int


class Answered(Event, name="benchmarks.Answered"):
    batch_id: UUID
    number: int


@dataclass(frozen=True)
class Round:
    """What the answers of one instance took on one side."""

    seconds: float
    #: How often the engine ran a delivery of an answer, those that met a conflict included.
    runs: int
    #: How many of these runs were in vain.
    conflicts: int
    #: How often the step was called.
    steps: int


class Calls:
    """How often a step was called, on whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def __call__(self) -> None:
        with self._lock:
            self.count += 1


class InProcess:
    """Deliveries that wait in this process in place of a broker."""

    hands_over = True

    def __init__(self) -> None:
        self.waiting: deque[UUID] = deque()

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None:
        self.waiting.extend(ids)


def main() -> None:
    options = parse()
    rounds: dict[str, list[Round]] = {side: [] for side in SIDES}
    with own_database(options.binding):
        for side in SIDES:
            one_round(side, min(options.answers, 50), options.threads)  # to warm up
        until = time.monotonic() + options.seconds
        while time.monotonic() < until or len(rounds["counter"]) < 2:
            turn = len(rounds["counter"]) % 2
            for side in SIDES[::-1] if turn else SIDES:  # they take turns at going first
                rounds[side].append(one_round(side, options.answers, options.threads))
        report = summary(rounds, options)
    print(json.dumps(report) if options.json else table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joins", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--answers", type=int, default=1000, help="to one instance (1000)")
    parser.add_argument("--threads", type=int, default=8, help="that deliver them (8)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="how long to begin further rounds (30)"
    )
    parser.add_argument("--binding", choices=BINDINGS, default="server", help="see benchmarks.step")
    return parser.parse_args()


def one_round(side: str, answers: int, threads: int) -> Round:
    """One instance, asked before the clock starts, and all of its answers."""
    batch_id = uuid4()
    with declared(side) as (process, calls):
        publish(Asked(batch_id=batch_id, answers=answers))
        work(process, threads=1)
        numbers = random.sample(range(answers), answers)
        publish(*(Answered(batch_id=batch_id, number=number) for number in numbers))
        began = time.perf_counter()
        work(process, threads)
        seconds = time.perf_counter() - began
    return checked(batch_id, answers, seconds, calls.count)


@contextmanager
def declared(side: str) -> Iterator[tuple[InProcess, Calls]]:
    """The workflow of this side, and nothing else, while the block runs."""
    process, calls, transport = InProcess(), Calls(), outbox.transport
    with isolated_registry():
        {"when_all": joins, "counter": counts}[side](calls)
        outbox.transport = process
        try:
            yield process, calls
        finally:
            outbox.transport = transport


def joins(calls: Callable[[], None]) -> None:
    class Joining(Workflow[BatchOrderState]):
        @started_by(Asked, once_per="batch_id")
        def ask(self, message: Asked) -> None:
            self.state.parcels = message.answers

        @when_all(Answered, count="parcels", lookup="batch_id")
        def all_there(self, messages: list[Answered]) -> None:
            calls()
            self.state.grams = len({message.number for message in messages})
            self.complete()


def counts(calls: Callable[[], None]) -> None:
    class Counting(Workflow[BatchOrderState]):
        @started_by(Asked, once_per="batch_id")
        def ask(self, message: Asked) -> None:
            self.state.parcels = message.answers

        @when(Answered, lookup="batch_id")
        def count(self, message: Answered) -> None:
            calls()
            self.state.grams += 1
            if self.state.grams == self.state.parcels:
                self.complete()


def work(process: InProcess, threads: int) -> None:
    """Deliver on so many threads until every delivery has ended."""
    deadline = time.monotonic() + LIMIT
    with ThreadPoolExecutor(threads) as pool:
        for worker in [pool.submit(deliver_all, process, deadline) for _ in range(threads)]:
            worker.result()


def deliver_all(process: InProcess, deadline: float) -> None:
    try:
        while time.monotonic() < deadline:
            try:
                dispatch.deliver(process.waiting.popleft())
            except IndexError:  # what met too many conflicts waits a moment, in the table
                if not relay.relay_once():
                    if not Delivery.objects.filter(status__in=UNENDED).exists():
                        return
                    time.sleep(0.005)
        raise SystemExit(f"A round took more than {LIMIT:.0f} seconds.")
    finally:
        connections.close_all()


def checked(batch_id: UUID, answers: int, seconds: float, steps: int) -> Round:
    """The figures of a round; both sides must have done the same work."""
    batch = BatchOrderState.objects.get(batch_id=batch_id)
    arrivals = Delivery.objects.filter(
        instance_id=batch.pk, message_name=Answered.stored_name(), status=Status.HANDLED
    )
    if (batch.lifecycle, batch.grams, arrivals.count()) != (Lifecycle.COMPLETED, answers, answers):
        raise SystemExit(f"{batch} is {batch.lifecycle} with {batch.grams} of {answers} answers.")
    conflicts = arrivals.aggregate(Sum("conflicts"))["conflicts__sum"]
    return Round(seconds, answers + conflicts, conflicts, steps)


def summary(rounds: dict[str, list[Round]], options: argparse.Namespace) -> dict[str, Any]:
    """What is printed. Of each figure the median, lowest and highest of the rounds."""
    figures = {
        side: {
            "seconds": spread([one.seconds for one in rounds[side]], 3),
            "runs": spread([one.runs for one in rounds[side]], 0),
            "conflicts": spread([one.conflicts for one in rounds[side]], 0),
            "step_calls": spread([one.steps for one in rounds[side]], 0),
        }
        for side in SIDES
    }
    pairs = list(zip(rounds["counter"], rounds["when_all"], strict=True))
    return {
        "counter_to_when_all": {
            "seconds": spread([counter.seconds / join.seconds for counter, join in pairs], 2),
            "runs": spread([counter.runs / join.runs for counter, join in pairs], 2),
        },
        **figures,
        "answers": options.answers,
        "threads": options.threads,
        "rounds": len(pairs),
        "binding": options.binding,
        "versions": {
            "postgres": ".".join(map(str, divmod(connection.pg_version, 10_000))),
            "python": platform.python_version(),
            **{name: version(name) for name in ("django", "psycopg")},
        },
    }


def table(report: dict[str, Any]) -> str:
    def line(name: str, figures: dict[str, float], form: str) -> str:
        return f"{name:34}" + "".join(
            f"{figures[key]:>12{form}}" for key in ("median", "min", "max")
        )

    lines = [f"{'per instance':34}{'median':>12}{'min':>12}{'max':>12}"]
    for side in SIDES:
        lines += [
            line(f"{side}: {name.replace('_', ' ')}", report[side][name], form)
            for name, form in (
                ("seconds", ",.2f"),
                ("runs", ",.0f"),
                ("conflicts", ",.0f"),
                ("step_calls", ",.0f"),
            )
        ]
    ratios = report["counter_to_when_all"]
    lines += [
        line("counter / when_all: seconds", ratios["seconds"], ",.2f"),
        line("counter / when_all: runs", ratios["runs"], ",.2f"),
        "",
        f"{report['rounds']} rounds, {report['answers']:,} answers, {report['threads']} threads;",
        ", ".join(f"{name} {number}" for name, number in report["versions"].items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
