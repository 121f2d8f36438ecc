import json
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.table import Table

from django_workflows import registry
from django_workflows.declarations import Handler, Lookup, Step, WorkflowDefinition, attribute
from django_workflows.errors import WorkflowsError
from django_workflows.instances import MANAGED
from django_workflows.management.output import new_table, show
from django_workflows.messages import Command as CommandMessage
from django_workflows.messages import Message


class Command(BaseCommand):
    help = "List what is declared: workflows with their steps, and plain handlers."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, **options: Any) -> None:
        declared = registry.current()
        try:
            workflows = [workflow_as_json(workflow) for workflow in declared.workflows]
            handlers = [handler_as_json(handler) for handler in declared.handlers]
        except WorkflowsError as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps({"workflows": workflows, "handlers": handlers}))
            return
        for workflow in workflows:
            show(self, workflow_table(workflow), options)
        if handlers:
            show(self, handlers_table(handlers), options)
        if not workflows and not handlers:
            self.stdout.write(
                "Nothing is declared. Workflows are found in the workflows.py, and handlers in the "
                "handlers.py, of every installed app."
            )


def workflow_as_json(workflow: WorkflowDefinition) -> dict[str, Any]:
    own_fields = [f for f in workflow.state._meta.concrete_fields if f.attname not in MANAGED]
    return {
        "name": workflow.name,
        "aliases": list(workflow.aliases),
        "declared_as": path_of(workflow.context_class) if workflow.is_class else "functions",
        "state": workflow.state._meta.label,
        "fields": [field.name for field in own_fields],
        "queue": workflow.queue,
        "steps": [step_as_json(step) for step in workflow.steps],
    }


def step_as_json(step: Step) -> dict[str, Any]:
    return {
        "message": step.message.stored_name(),
        "kind": kind_of(step.message),
        "step": step.name,
        "declared_by": step.decorator,
        "starts": step.starts,
        "lookup": lookup_as_text(step.lookup) if step.lookup is not None else None,
        "maps_to": None if step.starts else step.maps_to,
        "once_per": step.maps_to if step.starts else None,
        "if_missing": None if step.starts else missing_as_text(step),
    }


def handler_as_json(handler: Handler) -> dict[str, Any]:
    return {
        "name": handler.name,
        "aliases": list(handler.aliases),
        "message": handler.message.stored_name(),
        "kind": kind_of(handler.message),
        "function": path_of(handler.function),
        "queue": handler.queue,
        "atomic": handler.atomic,
    }


def missing_as_text(step: Step) -> str:
    if step.waits:
        return f"wait {step.waits.limit}, then {step.waits.then}"
    return str(step.if_missing)


def kind_of(message: type[Message]) -> str:
    return "command" if issubclass(message, CommandMessage) else "event"


def lookup_as_text(lookup: Lookup) -> str:
    if isinstance(lookup, str):
        return f"message.{lookup}"
    if isinstance(lookup, attribute):
        return f"attribute {lookup.key}"
    return path_of(lookup)


def path_of(declared: Callable[..., Any]) -> str:
    return f"{declared.__module__}.{getattr(declared, '__qualname__', repr(declared))}"


def workflow_table(workflow: dict[str, Any]) -> Table:
    title = f"{workflow['name']}\n"
    if workflow["state"] != workflow["name"]:
        title += f"state {workflow['state']}, "
    title += f"{workflow['declared_as']}, queue {workflow['queue']}"
    table = new_table("message", "step", "declared by", "instance", title=title)
    for step in workflow["steps"]:
        table.add_row(step["message"], step["step"], step["declared_by"], instance_of(step))
    return table


def instance_of(step: dict[str, Any]) -> str:
    """Which instance the step is for, in words."""
    lookup = step["lookup"]
    if step["starts"]:
        once_per = step["once_per"]
        if once_per is None:
            return "always a new one"
        origin = "" if lookup == f"message.{once_per}" else f", from {lookup}"
        return f"once per {once_per}{origin}"
    found = "by workflow id" if lookup is None else f"{step['maps_to']} = {lookup}"
    if step["if_missing"] == "ignore":
        return found
    return f"{found}, else {step['if_missing']}"


def handlers_table(handlers: list[dict[str, Any]]) -> Table:
    table = new_table("message", "handler", "queue", "transaction", title="Plain handlers")
    for handler in handlers:
        transaction = "one" if handler["atomic"] else "none (at least once)"
        table.add_row(handler["message"], handler["name"], handler["queue"], transaction)
    return table
