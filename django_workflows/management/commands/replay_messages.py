import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from django.utils import timezone
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from django_workflows.errors import WorkflowsError
from django_workflows.management.output import console_of, new_table, show
from django_workflows.models import REPLAYABLE, Delivery, Status
from django_workflows.replaying import Deliveries, replay, replayable, select

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
            "ids", nargs="*", type=a_uuid, metavar="ID", help="Deliveries, whatever their status."
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
        for option, text in (("--since", "at or after"), ("--until", "before")):
            parser.add_argument(
                option,
                type=an_aware_time,
                metavar="TIME",
                help=f"Only what failed, or was ignored or cancelled, {text} this time, with its "
                f"zone: 2026-03-01T09:00Z.",
            )
        parser.add_argument("--all", action="store_true", help="Without any filter.")
        parser.add_argument("--limit", type=at_least_one, metavar="N", help="At most so many.")
        parser.add_argument("--dry-run", action="store_true", help="Only say what would be done.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, **options: Any) -> None:
        refuse_nonsense(options)
        try:
            deliveries, skipped = chosen(options), skipped_of(options)
            if options["dry_run"]:
                groups = groups_of(deliveries, options["limit"])
            else:
                groups = self.replay(deliveries, options)
        except WorkflowsError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise CommandError(f"The database refused: {error}".strip()) from error
        self.report(groups, skipped, options)

    def replay(self, deliveries: Deliveries, options: dict[str, Any]) -> Groups:
        """Replay with a progress bar, on a terminal only."""
        groups: Groups = Counter()
        shown = not options["json"] and sys.stdout.isatty()
        total = replayable(deliveries)[: options["limit"]].count() if shown else None
        with progress_bar(shown, options) as progress:
            task = progress.add_task("replayed", total=total)

            def note(batch: Sequence[Delivery]) -> None:
                groups.update((row.handler, row.message_name, row.status) for row in batch)
                progress.advance(task, len(batch))

            try:
                replay(deliveries, limit=options["limit"], on_batch=note)
            except KeyboardInterrupt:
                raise CommandError(
                    f"Interrupted; {counted(groups.total())} had been replayed. "
                    f"Run the command again for the rest.",
                    returncode=130,
                ) from None
        return groups

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


def refuse_nonsense(options: dict[str, Any]) -> None:
    filters = ("ids", "status", "message", "handler", "workflow", "instance", "since", "until")
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
    names = ("message", "handler", "workflow", "instance", "since", "until")
    return select(
        ids=options["ids"] or None,
        statuses=statuses(options),
        **{name: options[name] for name in names},
    )


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


def at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1.")
    return int(text)
