"""Prune 200,000 finished instances while deliveries are handled: `python -m benchmarks.prune`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from django.db import connections

from benchmarks.fill import RUNNING, fill, use
from benchmarks.process import Process, lean_process
from django_workflows.models import LIVE, Delivery
from django_workflows.pruning import BATCH, Pruned, Terms, prune
from testproject.orders.models import FulfilmentState

#: Batches after which everything has been imported, compiled and grown to its size.
WARM = 5


@dataclass
class Orders:
    """A thread that places orders and handles all their deliveries, one after the other."""

    process: Process
    stop: threading.Event = field(default_factory=threading.Event)
    ended_at: list[float] = field(default_factory=list)
    longest: float = 0.0
    placed: int = 0

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.process.place_order()
                self.placed += 1
                while self.deliver_one():
                    self.ended_at.append(time.monotonic())
        finally:
            connections.close_all()

    def deliver_one(self) -> bool:
        began = time.monotonic()
        found = self.process.deliver_one()
        self.longest = max(self.longest, time.monotonic() - began)
        return found

    def per_second(self, since: float, until: float) -> float:
        return sum(since <= at < until for at in self.ended_at) / (until - since)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prune", description=__doc__)
    parser.add_argument("--instances", type=int, default=200_000, help="that have ended (200,000)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"of one transaction ({BATCH})")
    parser.add_argument("--json", action="store_true", help="on one line")
    parser.add_argument("--idle", action="store_true", help="handle no deliveries meanwhile")
    options = parser.parse_args()
    name = f"benchmark_prune_{os.getpid()}"
    use(name)
    try:
        filled = fill(options.instances * 100 // (100 - RUNNING), ago=100)
        figures = {"filled": asdict(filled), **measure(options)}
        print(json.dumps(figures, indent=None if options.json else 2))
    finally:
        connections.close_all()
        use(name, make=False)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    live = FulfilmentState.objects.filter(lifecycle__in=LIVE).count()
    with lean_process() as process:
        orders = Orders(process)
        thread = threading.Thread(target=orders.run)
        began = time.monotonic()
        if not options.idle:
            thread.start()
            time.sleep(3)  # how many are handled when nothing else is done
        started = time.monotonic()
        alone = orders.per_second(began + 0.5, started)
        orders.longest = 0.0
        figures = pruned(options.batch)
        ended = time.monotonic()
        orders.stop.set()
        if not options.idle:
            thread.join()
    left = FulfilmentState.objects.count()
    assert left == live + sum(figures["kept"].values()) + orders.placed
    return {
        **figures,
        "kept_live": live,
        "orders_meanwhile": orders.placed,
        "deliveries_left": Delivery.objects.count(),
        "handled_per_second": {
            "before": round(alone),
            "meanwhile": round(orders.per_second(started, ended)),
            "longest_seconds": round(orders.longest, 3),
        },
    }


def pruned(batch: int) -> dict[str, Any]:
    batches: list[float] = []
    warm_kb = peak_kb()

    def note(_so_far: Pruned) -> None:
        nonlocal warm_kb
        batches.append(time.monotonic())
        if len(batches) == WARM:
            warm_kb = peak_kb()

    began = time.monotonic()
    result = prune(Terms(batch=batch), on_batch=note)
    seconds = time.monotonic() - began
    instances = result.instances.total()
    lengths = [later - earlier for earlier, later in itertools.pairwise(batches)]
    return {
        "pruned": {"instances": instances, "deliveries": result.deliveries.total()},
        "kept": {f"{name}: {reason}": n for (name, reason), n in result.kept.items()},
        "seconds": round(seconds, 1),
        "instances_per_second": round(instances / seconds),
        "deliveries_per_second": round(result.deliveries.total() / seconds),
        "batch_seconds": {
            "median": round(statistics.median(lengths), 3),
            "max": round(max(lengths), 3),
        },
        "memory_growth_kb": peak_kb() - warm_kb,
    }


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
