import argparse
import json
import sys
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from django_workflows.management.naming import the_workflow
from django_workflows.management.output import console_of, new_table, show
from django_workflows.pruning import BATCH, Pruned, Terms, prune
from django_workflows.tables import refusal


class Command(BaseCommand):
    help = (
        "Delete instances that ended longer ago than their retention, with their deliveries, and "
        "old deliveries that belong to no instance. Nothing unfinished is touched, nor what has "
        "failed, unless --failed is given. It can be interrupted and repeated, and may run while "
        "workers do."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than",
            type=days,
            metavar="DAYS",
            help="What ended so many days ago, instead of RETENTION and workflow_retention.",
        )
        parser.add_argument(
            "--workflow", metavar="NAME", help="Only its instances, and deliveries to it."
        )
        parser.add_argument(
            "--failed",
            action="store_true",
            help="Failed deliveries too, and ended instances that have some.",
        )
        parser.add_argument(
            "--batch",
            type=from_1_to(10_000),
            default=BATCH,
            metavar="N",
            help=f"Rows of one transaction (default: {BATCH}).",
        )
        parser.add_argument(
            "--limit",
            type=from_1_to(10**12),
            metavar="N",
            help="At most so many instances, and deliveries that belong to none.",
        )
        parser.add_argument("--dry-run", action="store_true", help="Only say what would be done.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, **options: Any) -> None:
        terms = Terms(
            older_than=options["older_than"],
            workflow=the_workflow(options["workflow"]) if options["workflow"] else None,
            failed=options["failed"],
            batch=options["batch"],
            limit=options["limit"],
            dry_run=options["dry_run"],
        )
        try:
            pruned = self.prune(terms, options)
        except DatabaseError as error:
            raise CommandError(refusal(error)) from error
        self.report(pruned, options)

    def prune(self, terms: Terms, options: dict[str, Any]) -> Pruned:
        """Prune with a line of progress, on a terminal only."""
        so_far = Pruned()
        shown = not options["json"] and sys.stdout.isatty()
        with progress_line(shown, options) as progress:
            task = progress.add_task("looking")

            def note(pruned: Pruned) -> None:
                nonlocal so_far
                so_far = pruned
                progress.update(task, description=summary(pruned))

            try:
                return prune(terms, on_batch=note)
            except KeyboardInterrupt:
                raise CommandError(
                    f"Interrupted; {summary(so_far)} had been deleted. "
                    f"Run the command again for the rest.",
                    returncode=130,
                ) from None

    def report(self, pruned: Pruned, options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(as_json(pruned, options)))
            return
        verb = "Would delete" if options["dry_run"] else "Deleted"
        self.stdout.write(f"{verb} {summary(pruned)}.")
        names = sorted({*pruned.instances, *pruned.deliveries})
        if any(pruned.instances[name] or pruned.deliveries[name] for name in names):
            table = new_table("workflow or handler")
            table.add_column("instances", justify="right")
            table.add_column("deliveries", justify="right")
            for name in names:
                counts = (pruned.instances[name], pruned.deliveries[name])
                table.add_row(name, *(f"{count:,}" if count else "" for count in counts))
            show(self, table, options)
        for (name, reason), count in sorted(pruned.kept.items()):
            self.stdout.write(f"{count:,} of {name} stay: {reason}.")


def as_json(pruned: Pruned, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "dry_run": options["dry_run"],
        "instances": pruned.instances.total(),
        "deliveries": pruned.deliveries.total(),
        "workflows": {name: n for name, n in sorted(pruned.instances.items()) if n},
        "deliveries_to": {name: n for name, n in sorted(pruned.deliveries.items()) if n},
        "kept": [
            {"workflow": name, "reason": reason, "instances": n}
            for (name, reason), n in sorted(pruned.kept.items())
        ],
    }


def summary(pruned: Pruned) -> str:
    instances, deliveries = pruned.instances.total(), pruned.deliveries.total()
    return (
        f"{instances:,} {'instance' if instances == 1 else 'instances'} and "
        f"{deliveries:,} {'delivery' if deliveries == 1 else 'deliveries'}"
    )


def progress_line(shown: bool, options: dict[str, Any]) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console_of(options),
        transient=True,
        disable=not shown,
    )


def days(text: str) -> timedelta:
    try:
        length = timedelta(days=float(text))
    except (ValueError, OverflowError):
        length = timedelta(-1)
    if length < timedelta(0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days.")
    return length


def from_1_to(most: int) -> Any:
    def count(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most:,}.")
        return int(text)

    return count
