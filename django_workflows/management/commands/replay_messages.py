import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from django.utils import timezone
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from django_workflows.errors import WorkflowsError
from django_workflows.failures import group_of
from django_workflows.management.output import console_of, new_table, show
from django_workflows.models import REPLAYABLE, Delivery, Status
from django_workflows.replaying import (
    BATCH,
    Deliveries,
    edited,
    replay,
    replay_edited,
    replayable,
    select,
)
from django_workflows.tables import refusal

#: Handler, message and status of deliveries, and how many have them.
Groups = Counter[tuple[str, str, str]]


class Command(BaseCommand):
    help = (
        "Replay deliveries that failed, or were ignored or cancelled: they are due at once, with "
        "a fresh count of attempts. What is handled, pending or running is never touched, so the "
        "command can be interrupted and repeated."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "ids",
            nargs="*",
            type=a_uuid,
            metavar="ID",
            help="Deliveries that failed, or were ignored or cancelled.",
        )
        parser.add_argument(
            "--status",
            choices=[str(status) for status in REPLAYABLE],
            help="Only with this status (default: failed).",
        )
        parser.add_argument("--message", metavar="NAME", help="Only of this message.")
        parser.add_argument("--handler", metavar="NAME", help="Only to this plain handler.")
        parser.add_argument("--workflow", metavar="NAME", help="Only to this workflow.")
        parser.add_argument(
            "--instance",
            type=a_uuid,
            metavar="ID",
            help="Only to this instance, so far as it was known.",
        )
        parser.add_argument(
            "--error", metavar="CLASS", help="Only with this class of error: ValueError."
        )
        parser.add_argument(
            "--group",
            nargs=2,
            metavar=("NAME", "CLASS"),
            help="Only what failed alike: to this handler or workflow, with this class of error.",
        )
        for option, text in (("--since", "at or after"), ("--until", "before")):
            parser.add_argument(
                option,
                type=an_aware_time,
                metavar="TIME",
                help=f"Only what failed, or was ignored or cancelled, {text} this time, with its "
                f"zone: 2026-03-01T09:00Z.",
            )
        parser.add_argument("--all", action="store_true", help="Without any filter.")
        parser.add_argument(
            "--bodies-from",
            type=Path,
            metavar="FILE",
            help='Replay with edited bodies: one JSON object {"id": ..., "body": {...}} a line. '
            "All are checked against their messages before the first is replayed.",
        )
        parser.add_argument(
            "--rate", type=a_rate, metavar="N", help="At most so many a second (default: no limit)."
        )
        parser.add_argument("--limit", type=at_least_one, metavar="N", help="At most so many.")
        parser.add_argument("--dry-run", action="store_true", help="Only say what would be done.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, **options: Any) -> None:
        refuse_nonsense(options)
        if options["bodies_from"]:
            self.replay_edited(options)
            return
        try:
            deliveries, skipped = chosen(options), skipped_of(options)
            if options["dry_run"]:
                groups = groups_of(deliveries, options["limit"])
            else:
                groups = self.replay(deliveries, options)
        except WorkflowsError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise CommandError(refusal(error)) from error
        self.report(groups, skipped, options)

    def replay(self, deliveries: Deliveries, options: dict[str, Any]) -> Groups:
        """Replay with a progress bar, on a terminal only."""
        groups: Groups = Counter()
        pace = Pace(options["rate"])
        shown = not options["json"] and sys.stdout.isatty()
        total = replayable(deliveries)[: options["limit"]].count() if shown else None
        with progress_bar(shown, options) as progress:
            task = progress.add_task("replayed", total=total)

            def note(batch: Sequence[Delivery]) -> None:
                groups.update((row.handler, row.message_name, row.status) for row in batch)
                progress.advance(task, len(batch))
                pace.keep(groups.total())

            try:
                replay(deliveries, limit=options["limit"], on_batch=note, size=pace.batch)
            except KeyboardInterrupt:
                raise interrupted(groups.total()) from None
        return groups

    def replay_edited(self, options: dict[str, Any]) -> None:
        """Replay with the bodies of a file: all of them fit their messages, or none is replayed."""
        bodies = bodies_of(options["bodies_from"])
        groups, skipped = check_bodies(bodies)
        left = [pk for pk in bodies if pk not in dict(skipped)][: options["limit"]]
        if options["dry_run"]:
            self.report(Counter(groups[pk] for pk in left), skipped, options)
            return
        pace, done = Pace(options["rate"]), Counter[tuple[str, str, str]]()
        try:
            for pk in left:
                if replay_edited(pk, bodies[pk]):
                    done[groups[pk]] += 1
                    pace.keep(done.total())
                else:
                    skipped.append((pk, Delivery.objects.get(pk=pk).status))
        except KeyboardInterrupt:
            raise interrupted(done.total()) from None
        except (WorkflowsError, DatabaseError, Delivery.DoesNotExist) as error:
            raise CommandError(
                f"{counted(done.total())} had been replayed when {pk} was refused: {error}"
            ) from error
        self.report(done, skipped, options)

    def report(
        self, groups: Groups, skipped: Sequence[tuple[UUID, str]], options: dict[str, Any]
    ) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(as_json(groups, skipped, options)))
            return
        verb = "Would replay" if options["dry_run"] else "Replayed"
        self.stdout.write(f"{verb} {counted(groups.total())}.")
        if groups:
            table = new_table("handler", "message", "was")
            table.add_column("deliveries", justify="right")
            for names, count in sorted(groups.items()):
                table.add_row(*names, f"{count:,}")
            show(self, table, options)
        for delivery_id, status in skipped:
            self.stdout.write(f"{delivery_id} is {status}, so it was left alone.")
        if any(status == Status.PENDING for _id, status in skipped):
            self.stdout.write(
                "What is pending will be tried again by itself; Make due now, in the admin, "
                "brings it forward."
            )


FILTERS = ("ids", "status", "message", "handler", "workflow", "instance", "error", "group")
TIMES = ("since", "until")


class Pace:
    """Keeps to so many a second, in batches of what half a second may have."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.batch = max(1, min(BATCH, int(rate / 2))) if rate else None
        self.began = time.monotonic()

    def keep(self, done: int) -> None:
        """Wait until so many may have been done."""
        if self.rate:
            time.sleep(max(0.0, self.began + done / self.rate - time.monotonic()))


def bodies_of(file: Path) -> dict[UUID, str]:
    """The bodies of a file by the id of their delivery, as JSON. Raises `CommandError`."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error
    bodies: dict[UUID, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            pk, body = UUID(given["id"]), given["body"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CommandError(
                f'{file}, line {number}: write {{"id": "...", "body": {{...}}}} ({error!r}).'
            ) from error
        if pk in bodies:
            raise CommandError(f"{file}, line {number}: {pk} is there twice.")
        bodies[pk] = json.dumps(body)
    if not bodies:
        raise CommandError(f"{file} has no bodies.")
    return bodies


def check_bodies(
    bodies: dict[UUID, str],
) -> tuple[dict[UUID, tuple[str, str, str]], list[tuple[UUID, str]]]:
    """The group of each delivery, and those that cannot be replayed with their status.

    Raises `CommandError` for the first that does not exist, or whose body does not fit.
    """
    groups: dict[UUID, tuple[str, str, str]] = {}
    skipped: list[tuple[UUID, str]] = []
    for pk, body in bodies.items():
        delivery = Delivery.objects.filter(pk=pk).first()
        if delivery is None:
            raise CommandError(f"No delivery has the id {pk}. Nothing has been replayed.")
        groups[pk] = delivery.handler, delivery.message_name, delivery.status
        if delivery.status not in REPLAYABLE:
            skipped.append((pk, delivery.status))
            continue
        try:
            edited(delivery, body)
        except WorkflowsError as error:
            raise CommandError(f"{pk}: {error} Nothing has been replayed.") from error
    return groups, skipped


def interrupted(count: int) -> CommandError:
    return CommandError(
        f"Interrupted; {counted(count)} had been replayed. Run the command again for the rest.",
        returncode=130,
    )


def refuse_nonsense(options: dict[str, Any]) -> None:
    filters = (*FILTERS, *TIMES)
    if options["bodies_from"]:
        if options["all"] or any(options[name] for name in filters):
            raise CommandError(
                "--bodies-from names the deliveries itself. Give no ids and no filter with it."
            )
        return
    if not options["all"] and not any(options[name] for name in filters):
        raise CommandError(
            "Say what to replay: give ids or a filter such as --message, or --all for every "
            "failed delivery."
        )
    if options["all"] and options["ids"]:
        raise CommandError("Both ids and --all are given. Give one of them.")
    if options["since"] and options["until"] and options["since"] >= options["until"]:
        raise CommandError("--since is not before --until, so no delivery can fit.")


def statuses(options: dict[str, Any]) -> Sequence[str]:
    """The one asked for; else failed, or all that can be replayed when ids are given."""
    if options["status"]:
        return [options["status"]]
    return REPLAYABLE if options["ids"] else [Status.FAILED]


def chosen(options: dict[str, Any]) -> Deliveries:
    names = ("message", "handler", "workflow", "instance", "error", "since", "until")
    found = select(
        ids=options["ids"] or None,
        statuses=statuses(options),
        **{name: options[name] for name in names},
    )
    return found & group_of(*options["group"]) if options["group"] else found


def skipped_of(options: dict[str, Any]) -> list[tuple[UUID, str]]:
    """Of the ids that were given, those whose status keeps them from being replayed."""
    found = dict(Delivery.objects.filter(pk__in=options["ids"]).values_list("pk", "status"))
    for delivery_id in options["ids"]:
        if delivery_id not in found:
            raise CommandError(f"No delivery has the id {delivery_id}.")
    return [(pk, status) for pk, status in found.items() if status not in statuses(options)]


def groups_of(deliveries: Deliveries, limit: int | None) -> Groups:
    rows = replayable(deliveries).order_by("pk").values_list("handler", "message_name", "status")
    return Counter(rows[:limit].iterator())


def as_json(
    groups: Groups, skipped: Sequence[tuple[UUID, str]], options: dict[str, Any]
) -> dict[str, Any]:
    count = groups.total()
    return {
        "dry_run": options["dry_run"],
        **({"replayed": 0, "would_replay": count} if options["dry_run"] else {"replayed": count}),
        "groups": [
            {"handler": handler, "message": message, "status": status, "deliveries": count}
            for (handler, message, status), count in sorted(groups.items())
        ],
        "skipped": [{"id": str(pk), "status": status} for pk, status in skipped],
    }


def progress_bar(shown: bool, options: dict[str, Any]) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console_of(options),
        transient=True,
        disable=not shown,
    )


def counted(count: int) -> str:
    return f"{count:,} {'delivery' if count == 1 else 'deliveries'}"


def a_uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a UUID.") from None


def an_aware_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time. Write it like 2026-03-01T09:00Z."
        ) from None
    if timezone.is_naive(time):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no time zone. Write {time.isoformat(timespec='minutes')}Z for UTC, or "
            f"an offset such as +02:00."
        )
    return time


def a_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0.")
    return rate


def at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1.")
    return int(text)
