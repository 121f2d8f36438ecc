"""Which instance a message is for, and which step of the workflow runs on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from django_workflows.endings import Ignored
from django_workflows.errors import InstanceMissing, InstanceRequired, LookupMismatch
from django_workflows.instances import StateTable, key_of
from django_workflows.messages import Message
from django_workflows.models import Delivery, WorkflowState
from django_workflows.registry import Step, WorkflowDefinition

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The instance that a step runs on."""

    step: Step
    instance: WorkflowState
    before: dict[str, Any]


def find(
    cursor: CursorWrapper,
    table: StateTable,
    definition: WorkflowDefinition,
    message: Message,
    delivery: Delivery,
    *,
    contested: bool,
) -> Target | Ignored | list[WorkflowState]:
    """The instance and step for the message: one to continue, else one to start, else none."""
    step, start = definition.step_of(type(message)), definition.start_of(type(message))
    matches = matching(cursor, table, definition, step, message, delivery) if step else []
    live = [instance for instance in matches if instance.is_live]
    if len(live) > 1:
        return live
    if step and live:
        return Target(step, live[0], table.snapshot(live[0]))
    if start and not delivery.part:
        return start_of(cursor, table, start, message, delivery, contested=contested)
    if matches:
        return ended(definition, matches[0].pk)
    return missing(cursor, table, definition, step, message, delivery)


def matching(
    cursor: CursorWrapper,
    table: StateTable,
    definition: WorkflowDefinition,
    step: Step,
    message: Message,
    delivery: Delivery,
) -> list[WorkflowState]:
    """The instance this copy or reply is for; else by lookup; else by the id that travelled."""
    if delivery.part:
        found = table.by_id(cursor, UUID(delivery.part))
    elif step.lookup is not None:
        key = key_of(step, message, delivery)
        if key is None or key == "":
            return []
        return table.live(cursor, step.maps_to or "", key)
    else:
        travelled = delivery.workflow_ids.get(definition.name)
        found = table.by_id(cursor, UUID(travelled)) if travelled else None
    return [found] if found else []


def start_of(
    cursor: CursorWrapper,
    table: StateTable,
    step: Step,
    message: Message,
    delivery: Delivery,
    *,
    contested: bool,
) -> Target | Ignored:
    """A new instance; or, once a constraint has refused one, the reason to start none."""
    instance = table.model()
    before = table.snapshot(instance)
    if delivery.sender_instance_id is not None:
        instance.starter_workflow = delivery.sender
        instance.starter_id = delivery.sender_instance_id
    if step.maps_to:
        key = key_of(step, message, delivery)
        if key is None or key == "":
            raise LookupMismatch(
                f"{type(message).__qualname__} starts one instance per {step.maps_to}, and its "
                f"value is {key!r}. Give the message a value."
            )
        if contested and (other := table.any(cursor, step.maps_to, key)):
            return Ignored(f"{table.model._meta.label} {other} has {step.maps_to} {key}.", other)
        field: Any = table.model._meta.get_field(step.maps_to)
        setattr(instance, field.attname, table.converted(step.maps_to, key))
    before = {
        **before,
        **{name: getattr(instance, name) for name in ("starter_workflow", "starter_id")},
    }
    return Target(step, instance, before)


def ended(definition: WorkflowDefinition, instance_id: UUID) -> Ignored:
    logger.info("A message for %s %s came after its end.", definition.name, instance_id)
    return Ignored(f"{definition.name} {instance_id} has ended.", instance_id)


def missing(
    cursor: CursorWrapper,
    table: StateTable,
    definition: WorkflowDefinition,
    step: Step | None,
    message: Message,
    delivery: Delivery,
) -> Ignored:
    """No live instance matches: ended ones are quiet, the rest is as `if_missing` says."""
    name = type(message).stored_name()
    sought = "the workflow id that travelled along"
    if step and step.lookup is not None and not delivery.part:
        key = key_of(step, message, delivery)
        sought = f"{step.maps_to} {key!r:.100}"
        if key is not None and key != "":
            other = table.any(cursor, step.maps_to or "", key)
            if other is not None:
                return ended(definition, other)
    reason = f"No instance of {definition.name} matches {name} by {sought}."
    if step and step.if_missing == "fail":
        raise InstanceRequired(f"{reason} Replay the delivery once there is one.")
    if step and step.if_missing == "retry":
        raise InstanceMissing(reason)
    logger.warning("%s The message is ignored.", reason)
    return Ignored(reason)
