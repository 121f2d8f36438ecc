import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, transaction

from django_workflows import outbox, registry
from django_workflows.cancelling import cancel_instance, children_of
from django_workflows.declarations import WorkflowDefinition
from django_workflows.management.output import new_table, show
from django_workflows.models import LIVE, WorkflowState
from django_workflows.tables import refusal


@dataclass(frozen=True)
class Chosen:
    """An instance that is to be cancelled, as it was before."""

    workflow: WorkflowDefinition
    instance: WorkflowState
    #: The instance that started it, when it is cancelled because that is.
    parent: UUID | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": str(self.instance.pk),
            "workflow": self.workflow.name,
            "lifecycle": str(self.instance.lifecycle),
            "parent": str(self.parent) if self.parent else None,
        }


class Command(BaseCommand):
    help = (
        "Cancel instances of workflows: each ends as cancelled, and what waits for it is cancelled "
        "too. One that has ended is left alone, so the command can be repeated."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("ids", nargs="*", type=a_uuid, metavar="ID", help="Of instances.")
        parser.add_argument("--workflow", metavar="NAME", help="Only instances of this workflow.")
        parser.add_argument(
            "--all", action="store_true", help="Every instance of --workflow that has not ended."
        )
        parser.add_argument(
            "--cascade", action="store_true", help="Also what they have started, and so on."
        )
        parser.add_argument("--reason", default="", help="Kept with each cancelled delivery.")
        parser.add_argument("--dry-run", action="store_true", help="Only say what would be done.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, **options: Any) -> None:
        refuse_nonsense(options)
        workflows = workflows_named(options["workflow"])
        try:
            found = list(live_in(workflows) if options["all"] else given(options["ids"], workflows))
            live = [one for one in found if one.instance.is_live]
            cancelled = [family for one in live if (family := cancel(one, options))]
        except DatabaseError as error:
            raise CommandError(refusal(error)) from error
        ended = [one for one in found if not one.instance.is_live]
        self.report([one for family in cancelled for one in family], ended, options)

    def report(
        self, cancelled: Sequence[Chosen], skipped: Sequence[Chosen], options: dict[str, Any]
    ) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(as_json(cancelled, skipped, options)))
            return
        verb = "Would cancel" if options["dry_run"] else "Cancelled"
        noun = "instance" if len(cancelled) == 1 else "instances"
        self.stdout.write(f"{verb} {len(cancelled):,} {noun}.")
        if cancelled:
            table = new_table("workflow", "instance", "was", "started by")
            for one in cancelled:
                parent = str(one.parent) if one.parent else ""
                table.add_row(
                    one.workflow.name, str(one.instance.pk), one.instance.lifecycle, parent
                )
            show(self, table, options)
        for one in skipped:
            self.stdout.write(
                f"{one.instance.pk} is {one.instance.lifecycle}, so it was left alone."
            )


def refuse_nonsense(options: dict[str, Any]) -> None:
    if options["all"] and options["ids"]:
        raise CommandError("Both ids and --all are given. Give one of them.")
    if options["all"] and not options["workflow"]:
        raise CommandError("--all needs --workflow: say whose instances are to be cancelled.")
    if not options["all"] and not options["ids"]:
        raise CommandError(
            "Say what to cancel: give the ids of instances, or --workflow NAME --all."
        )


def workflows_named(name: str | None) -> list[WorkflowDefinition]:
    """The workflow of this name or alias; all of them without one."""
    known = registry.current().workflows
    if name is None:
        return known
    if named := [workflow for workflow in known if name in workflow.names]:
        return named
    nearest = get_close_matches(name, [workflow.name for workflow in known], n=1, cutoff=0.5)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "list_workflows shows what there is."
    raise CommandError(f"No workflow is named {name!r}. {remedy}")


def given(ids: Sequence[UUID], workflows: Sequence[WorkflowDefinition]) -> Iterator[Chosen]:
    """The instances of these ids, each once, in the order in which they were given."""
    found = {
        instance.pk: Chosen(workflow, instance)
        for workflow in workflows
        for instance in instances_of(workflow).filter(pk__in=ids)
    }
    for instance_id in dict.fromkeys(ids):
        if instance_id not in found:
            raise CommandError(f"No instance has the id {instance_id}.")
        yield found[instance_id]


def live_in(workflows: Sequence[WorkflowDefinition]) -> Iterator[Chosen]:
    for workflow in workflows:
        for instance in instances_of(workflow).filter(lifecycle__in=LIVE).order_by("pk"):
            yield Chosen(workflow, instance)


def instances_of(workflow: WorkflowDefinition) -> Any:
    """Read where they are written."""
    return workflow.state._default_manager.using(outbox.database().alias)


def cancel(one: Chosen, options: dict[str, Any]) -> list[Chosen]:
    """Cancel it, unless this is a dry run; it and what was cancelled with it, none if it ended."""
    with transaction.atomic(using=outbox.database().alias):
        family = [one, *(descendants(one) if options["cascade"] else ())]
        if options["dry_run"]:
            return family
        done = cancel_instance(one.instance, reason=options["reason"], cascade=options["cascade"])
    return family if done else []


def descendants(one: Chosen) -> Iterator[Chosen]:
    """What it has started and has not ended, and what that has started."""
    by_state = {workflow.state: workflow for workflow in registry.current().workflows}
    for instance in children_of(one.workflow, one.instance):
        child = Chosen(by_state[type(instance)], instance, one.instance.pk)
        yield child
        yield from descendants(child)


def as_json(
    cancelled: Sequence[Chosen], skipped: Sequence[Chosen], options: dict[str, Any]
) -> dict[str, Any]:
    count = len(cancelled)
    return {
        "dry_run": options["dry_run"],
        **({"cancelled": 0, "would_cancel": count} if options["dry_run"] else {"cancelled": count}),
        "instances": [one.as_json() for one in cancelled],
        "skipped": [one.as_json() for one in skipped],
    }


def a_uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a UUID.") from None
