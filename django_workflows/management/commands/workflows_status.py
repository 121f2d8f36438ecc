import argparse
import json
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from rich.table import Table

from django_workflows.management.naming import the_workflow
from django_workflows.management.output import new_table, show
from django_workflows.models import Lifecycle, Worker
from django_workflows.status import (
    OVERDUE_AFTER,
    Backlog,
    Bar,
    Figure,
    Overview,
    Recipient,
    Workflow,
    overview,
)
from django_workflows.tables import refusal


class Command(BaseCommand):
    help = (
        "Show how things stand: instances, what waits, what is overdue, what has failed, and who "
        "works. With limits it is made for monitoring: it ends with exit code 1 when one is "
        "passed, and says which. Estimates are marked with ~, minima with +."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--workflow", metavar="NAME", action="append", help="Only this; may be repeated."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")
        parser.add_argument(
            "--overdue-after",
            type=seconds,
            default=OVERDUE_AFTER,
            metavar="SECONDS",
            help="A delivery that has been due for longer counts as overdue (default: "
            f"{OVERDUE_AFTER.total_seconds():g}).",
        )
        limits = parser.add_argument_group("limits, beyond which the exit code is 1")
        limits.add_argument(
            "--max-overdue",
            type=seconds,
            metavar="SECONDS",
            help="The oldest due delivery has been due for longer.",
        )
        limits.add_argument(
            "--max-due", type=number, metavar="N", help="More deliveries are due and not taken."
        )
        limits.add_argument(
            "--max-failed", type=number, metavar="N", help="More deliveries have failed."
        )
        limits.add_argument(
            "--max-failed-instances",
            type=number,
            metavar="N",
            help="More instances have failed while they were undone.",
        )
        limits.add_argument(
            "--max-age",
            type=seconds,
            metavar="SECONDS",
            help="An instance has been running for longer.",
        )
        limits.add_argument(
            "--need-workers",
            action="store_true",
            help="No worker, or nobody who looks for what is due, has been seen lately.",
        )

    def handle(self, **options: Any) -> None:
        names = options["workflow"]
        try:
            seen = overview(
                workflows=[the_workflow(name) for name in names] if names else None,
                overdue_after=options["overdue_after"],
            )
        except DatabaseError as error:
            raise CommandError(refusal(error), returncode=2) from error
        beyond = list(limits_passed(seen, options))
        if options["json"]:
            self.stdout.write(json.dumps(as_json(seen, beyond)))
        else:
            self.report(seen, options)
        if beyond:
            raise CommandError("\n".join(beyond), returncode=1)

    def report(self, seen: Overview, options: dict[str, Any]) -> None:
        if seen.workflows:
            show(self, workflows_table(seen), options)
        show(self, backlog_table(seen), options)
        show(self, rates_table(seen), options)
        self.stdout.write(in_words(seen))


# Limits


def limits_passed(seen: Overview, options: dict[str, Any]) -> Iterator[str]:
    """A sentence for each limit that is passed."""
    overdue = seen.age(seen.backlog.oldest_due_at)
    if options["max_overdue"] is not None and overdue and overdue > options["max_overdue"]:
        yield (
            f"A delivery has been due for {in_seconds(overdue)}, and --max-overdue is "
            f"{in_seconds(options['max_overdue'])}."
        )
    failed_instances = sum((w.instances[Lifecycle.FAILED] for w in seen.workflows), Figure())
    for option, figure, what in (
        ("max_due", seen.backlog.due, "deliveries are due and not taken"),
        ("max_failed", seen.backlog.failed, "deliveries have failed"),
        ("max_failed_instances", failed_instances, "instances have failed"),
    ):
        if options[option] is not None and figure.value > options[option]:
            yield f"{figure} {what}, and --{option.replace('_', '-')} is {options[option]:,}."
    if options["max_age"] is not None:
        yield from too_old(seen, options["max_age"])
    if options["need_workers"] and not seen.workers_seen_lately:
        yield f"No worker has been seen lately{last_seen(seen, seen.workers)} (--need-workers)."
    elif options["need_workers"] and not seen.relays_seen_lately:
        yield "Nobody who looks for what is due has been seen lately (--need-workers)."


def too_old(seen: Overview, limit: timedelta) -> Iterator[str]:
    for workflow in seen.workflows:
        age = seen.age(workflow.oldest_running_at)
        if age is not None and age > limit:
            yield (
                f"{workflow.name} {workflow.oldest_running_id} has been running for "
                f"{in_seconds(age)}, and --max-age is {in_seconds(limit)}."
            )


# JSON


def as_json(seen: Overview, beyond: Sequence[str]) -> dict[str, Any]:
    return {
        "at": seen.at.isoformat(),
        "beyond_limits": list(beyond),
        "workflows": [workflow_as_json(seen, workflow) for workflow in seen.workflows],
        "handlers": [recipient_as_json(seen, handler) for handler in seen.handlers],
        "deliveries": backlog_as_json(seen, seen.backlog),
        "minutes": [bar_as_json(bar) for bar in seen.minutes],
        "hours": [bar_as_json(bar) for bar in seen.hours],
        "workers_seen_lately": len(seen.workers_seen_lately),
        "relays_seen_lately": len(seen.relays_seen_lately),
        "workers": [worker_as_json(worker) for worker in seen.workers],
    }


def workflow_as_json(seen: Overview, workflow: Workflow) -> dict[str, Any]:
    age = seen.age(workflow.oldest_running_at)
    return {
        **recipient_as_json(seen, workflow),
        "instances": {str(k): figure_as_json(figure) for k, figure in workflow.instances.items()},
        "oldest_running": None
        if age is None
        else {"id": str(workflow.oldest_running_id), "age_seconds": round(age.total_seconds(), 3)},
    }


def recipient_as_json(seen: Overview, recipient: Recipient) -> dict[str, Any]:
    return {"name": recipient.name, "deliveries": backlog_as_json(seen, recipient.backlog)}


def backlog_as_json(seen: Overview, backlog: Backlog) -> dict[str, Any]:
    age = seen.age(backlog.oldest_due_at)
    return {
        **{name: figure_as_json(getattr(backlog, name)) for name in KINDS},
        "oldest_due_seconds": None if age is None else round(age.total_seconds(), 3),
    }


KINDS = ("waiting", "due", "overdue", "running", "failed")


def figure_as_json(figure: Figure) -> dict[str, Any]:
    return {
        "value": figure.value,
        "is_estimate": figure.is_estimate,
        "is_minimum": figure.is_minimum,
    }


def bar_as_json(bar: Bar) -> dict[str, Any]:
    return {
        "start": bar.start.isoformat(),
        "handled": figure_as_json(bar.handled),
        "failed": figure_as_json(bar.failed),
    }


def worker_as_json(worker: Worker) -> dict[str, Any]:
    return {
        "host": worker.host,
        "pid": worker.pid,
        "queues": worker.queues,
        "relays": worker.relays,
        "started_at": worker.started_at.isoformat(),
        "seen_at": worker.seen_at.isoformat(),
    }


# Tables


def workflows_table(seen: Overview) -> Table:
    table = new_table("workflow", title="Instances")
    for lifecycle in Lifecycle:
        table.add_column(str(lifecycle.label), justify="right")
    table.add_column("oldest running", justify="right")
    for workflow in seen.workflows:
        figures = (shown(workflow.instances[lifecycle]) for lifecycle in Lifecycle)
        table.add_row(workflow.name, *figures, in_short(seen.age(workflow.oldest_running_at)))
    return table


def backlog_table(seen: Overview) -> Table:
    table = new_table("to", title="Deliveries")
    for kind in KINDS:
        table.add_column(kind, justify="right")
    table.add_column("oldest due for", justify="right")
    rows: list[tuple[str, Backlog]] = [
        (recipient.name, recipient.backlog) for recipient in (*seen.workflows, *seen.handlers)
    ]
    for name, backlog in (*rows, ("together", seen.backlog)):
        figures = (shown(getattr(backlog, kind)) for kind in KINDS)
        table.add_row(name, *figures, in_short(seen.age(backlog.oldest_due_at)))
    return table


def rates_table(seen: Overview) -> Table:
    table = new_table("ended in the last", title="Handled, and failed for good")
    for name in ("handled", "failed"):
        table.add_column(name, justify="right")
    for title, bars in (
        ("minute, so far", seen.minutes[-1:]),
        ("5 full minutes", seen.minutes[-6:-1]),
        (f"{len(seen.minutes) - 1} full minutes", seen.minutes[:-1]),
        (f"{len(seen.hours) - 1} full hours", seen.hours[:-1]),
    ):
        handled = sum((bar.handled for bar in bars), Figure())
        table.add_row(title, str(handled), str(sum((bar.failed for bar in bars), Figure())))
    return table


def in_words(seen: Overview) -> str:
    """Who works."""
    workers, relays = seen.workers_seen_lately, seen.relays_seen_lately
    if not workers and not relays:
        return f"No worker has been seen lately{last_seen(seen, seen.workers)}."
    hosts = len({worker.host for worker in (*workers, *relays)})
    return (
        f"{len(workers)} worker {'process' if len(workers) == 1 else 'processes'} and "
        f"{len(relays)} that look for what is due, on {hosts} "
        f"{'machine' if hosts == 1 else 'machines'}."
    )


def last_seen(seen: Overview, workers: Sequence[Worker]) -> str:
    if not workers:
        return ""
    return f"; the last was {workers[0]}, {in_short(seen.age(workers[0].seen_at))} ago"


def shown(figure: Figure) -> str:
    return str(figure) if figure.value else ""


def in_seconds(length: timedelta) -> str:
    return f"{length.total_seconds():,.0f} s"


def in_short(length: timedelta | None) -> str:
    """The length in its two largest units."""
    if length is None:
        return ""
    left = int(length.total_seconds())
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


# Arguments


def seconds(text: str) -> timedelta:
    try:
        value = float(text)
        if value >= 0 and math.isfinite(value):
            return timedelta(seconds=value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds.")


def number(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number.")
    return int(text)
