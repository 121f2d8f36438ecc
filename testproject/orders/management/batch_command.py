"""What `demo` and `place_orders` share: their options, the progress bar, the table or the JSON."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from testproject import batches
from testproject.batches import Batch
from testproject.database import UnusableError, check_reachable
from testproject.variants import VARIANTS


def at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class BatchCommand(BaseCommand):
    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--style",
            choices=sorted(VARIANTS),
            default="class",
            help="Place with the workflow declared as a class (default) or with functions.",
        )
        parser.add_argument(
            "--timeout",
            type=at_least_one,
            default=300,
            metavar="SECONDS",
            help="Give up waiting after so long (default: 300).",
        )
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object instead of a table."
        )

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Ask the database first: Django's own checks of it end in a traceback."""
        try:
            check_reachable()
            return super().execute(*args, **options)
        except UnusableError as error:
            raise CommandError(str(error)) from error

    def new_batch(self, size: int, options: dict[str, Any]) -> Batch:
        return Batch(VARIANTS[options["style"]], size, time.monotonic() + options["timeout"])

    def follow(
        self,
        batch: Batch,
        options: dict[str, Any],
        *,
        wait: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Place the batch, wait for it, return its summary; `check` is called all along."""
        with self._progress(options) as progress:
            placed = progress.add_task("placed", total=batch.size)
            ended = progress.add_task("ended", total=batch.size, visible=wait)
            for _ in batches.place(batch):
                progress.advance(placed)
            for count in batches.wait(batch) if wait else ():
                progress.update(ended, completed=count)
                check()
        return batches.summary(batch)

    def report(self, summary: dict[str, Any], options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(summary))
        else:
            self.print(_table(summary), options)
            if options.get("wait", True):  # else hardly any can have ended
                self.stdout.write(in_words(summary))

    def fail_if_unfinished(
        self,
        summary: dict[str, Any],
        options: dict[str, Any],
        hint: str = "is a worker running (python manage.py rundramatiq)?",
    ) -> None:
        """Raises `CommandError`; the hint says where else to look."""
        if unfinished := summary["unfinished"]:
            raise CommandError(
                f"{unfinished} of {summary['orders']} orders have not ended within "
                f"{options['timeout']} seconds. The admin's list of deliveries says what waits or "
                f"failed; {hint}"
            )

    def print(self, renderable: Any, options: dict[str, Any]) -> None:
        console = _console(options)
        with console.capture() as capture:
            console.print(renderable)
        self.stdout.write(capture.get())

    def _progress(self, options: dict[str, Any]) -> Progress:
        return Progress(
            TextColumn("{task.description:>6}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=_console(options),
            transient=True,
            disable=options["json"] or not sys.stdout.isatty(),
        )


def _console(options: dict[str, Any]) -> Console:
    return Console(no_color=options["no_color"] or None)


def in_words(summary: dict[str, Any]) -> str:
    """The one sentence: "100 of 100 orders are accounted for: 94 completed, 6 declined."."""
    orders = summary["orders"]
    names = ("completed", "declined", "compensated")
    ended = ", ".join(f"{summary[name]:,} {name}" for name in names if summary[name])
    return (
        f"{orders - summary['unfinished']:,} of {orders:,} orders are accounted for"
        f"{': ' if ended else ''}{ended}."
    )


def _table(summary: dict[str, Any]) -> Table:
    table = Table("what", "figure", title=f"{summary['orders']} orders")
    table.columns[1].justify = "right"
    for name in ("completed", "declined", "compensated", "unfinished"):
        table.add_row(name, f"{summary[name]:,}")
    table.add_section()
    for name, count in summary["rows"].items():
        table.add_row(name, f"{count:,}")
    table.add_section()
    for status, count in summary["deliveries"].items():
        table.add_row(f"deliveries {status}", f"{count:,}")
    table.add_row("retries", f"{summary['retries']:,}")
    table.add_row("conflicts", f"{summary['conflicts']:,}")
    table.add_section()
    table.add_row("seconds", f"{summary['seconds']:,.1f}")
    table.add_row("deliveries per second", f"{summary['deliveries_per_second']:,.1f}")
    for name, latency in summary["latency_ms"].items():
        figure = "\N{EN DASH}" if latency is None else f"{latency:,.0f}"
        table.add_row(f"ms from placed to completed, {name}", figure)
    return table
