from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from django_workflows import __version__, outbox, registry
from django_workflows.declarations import WorkflowDefinition
from django_workflows.exporting import as_text, export
from django_workflows.management.commands.replay_messages import a_uuid
from django_workflows.management.naming import the_workflow
from django_workflows.models import WorkflowState, WorkflowStateQuerySet
from django_workflows.tables import refusal

Found = tuple[WorkflowDefinition, WorkflowState]


class Command(BaseCommand):
    help = (
        "Print one instance with its fields and every delivery to it and of it as JSON, for a bug "
        "report. What is marked as sensitive is masked."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("id", type=a_uuid, metavar="ID", help="The instance's id.")
        parser.add_argument("--workflow", metavar="NAME", help="Its workflow, if known.")
        parser.add_argument(
            "--unmasked", action="store_true", help="With what is sensitive: not for others' eyes."
        )
        parser.add_argument("--output", metavar="FILE", help="Write it there; it must not exist.")

    def handle(self, **options: Any) -> None:
        try:
            definition, instance = the_instance(options["id"], options["workflow"])
            exported = export(definition, instance, unmasked=options["unmasked"])
        except DatabaseError as error:
            raise CommandError(refusal(error)) from error
        text = as_text({"django_workflows": __version__, **exported})
        if options["unmasked"]:
            self.stderr.write("What is sensitive is not masked: mind who reads it.")
        if not options["output"]:
            self.stdout.write(text)
            return
        try:
            with Path(options["output"]).open("x", encoding="utf-8", errors="replace") as file:
                file.write(f"{text}\n")
        except OSError as error:
            raise CommandError(f"{options['output']} cannot be written: {error}") from error


def the_instance(pk: UUID, workflow: str | None) -> Found:
    """The instance of this id, of this workflow or of whichever has it."""
    definitions = [the_workflow(workflow)] if workflow else registry.current().workflows
    for definition in definitions:
        rows: Any = WorkflowStateQuerySet(definition.state, using=outbox.database().alias)
        instance = rows.filter(pk=pk).first()
        if instance is not None:
            return definition, instance
    where = f"of {workflow}" if workflow else "of any workflow"
    raise CommandError(f"No instance {where} has the id {pk}.")
