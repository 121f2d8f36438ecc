from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from django_workflows import graph
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import WorkflowsError
from django_workflows.models import WorkflowState
from django_workflows.tables import refusal

FORMATS = {
    "mermaid": graph.as_mermaid,
    "dot": graph.as_dot,
    "svg": lambda drawn: graph.as_svg(drawn, standalone=True) + "\n",
    "json": graph.as_json,
}


class Command(BaseCommand):
    help = (
        "Draw a workflow: its steps, and what recent deliveries say they exchange, how often and "
        "how fast. With --instance, where that instance is."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("workflow", metavar="WORKFLOW", help="Its name; see list_workflows.")
        parser.add_argument(
            "--format", choices=list(FORMATS), default="mermaid", help="Default: mermaid."
        )
        parser.add_argument("--instance", metavar="ID", help="Mark where this instance is.")
        parser.add_argument("--output", type=Path, metavar="FILE", help="Write it to this file.")

    def handle(self, **options: Any) -> None:
        try:
            definition = graph.workflow_named(options["workflow"])
            instance = instance_of(definition, options["instance"])
            drawn = FORMATS[options["format"]](graph.graph_of(definition, instance))
        except WorkflowsError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise CommandError(refusal(error)) from error
        if options["output"] is None:
            self.stdout.write(drawn, ending="")
            return
        try:
            options["output"].write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{options['output']} cannot be written: {error}") from error


def instance_of(definition: WorkflowDefinition, pk: str | None) -> WorkflowState | None:
    if pk is None:
        return None
    try:
        found: WorkflowState | None = definition.state._base_manager.filter(pk=pk).first()
    except ValidationError:
        raise CommandError(f"{pk!r} is not a UUID.") from None
    if found is None:
        raise CommandError(f"{definition.name} has no instance {pk}.")
    return found
