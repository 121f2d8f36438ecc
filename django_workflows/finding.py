"""Which instance a message is for, and which step of the workflow runs on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django_workflows import outbox, parking
from django_workflows.declarations import Step, WorkflowDefinition
from django_workflows.endings import Ignored, Parked
from django_workflows.errors import InstanceMissing, InstanceRequired, LookupMismatch
from django_workflows.instances import StateTable, key_of
from django_workflows.messages import Message
from django_workflows.models import Delivery, WorkflowState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The instance that a step runs on."""

    step: Step
    instance: WorkflowState
    before: dict[str, Any]


def find(
    table: StateTable,
    definition: WorkflowDefinition,
    message: Message,
    delivery: Delivery,
    *,
    contested: bool,
) -> Target | Ignored | Parked | list[WorkflowState]:
    """The instance and step for the message: one to continue, else one to start, else none."""
    step, start = definition.step_of(message), definition.start_of(message)
    matches = matching(table, definition, step, message, delivery) if step else []
    live = [instance for instance in matches if instance.is_live]
    if len(live) > 1:
        return live
    if step and live:
        return Target(step, live[0], table.snapshot(live[0]))
    if start and not delivery.part:
        return start_of(table, start, message, delivery, contested=contested)
    if matches:
        return ended(definition, matches[0].pk)
    if key := waiting_key(table, definition, step, message, delivery):
        return park(table, definition, message, delivery, key)
    return missing(table, definition, step, message, delivery)


def matching(
    table: StateTable,
    definition: WorkflowDefinition,
    step: Step,
    message: Message,
    delivery: Delivery,
) -> list[WorkflowState]:
    """The instance this copy or reply is for; else by lookup; else by the id that travelled."""
    connection, lock = outbox.database(), bool(step.join)
    if delivery.part:
        found = table.by_id(connection, UUID(delivery.part), lock=lock)
    elif step.lookup is not None:
        key = key_of(step, message, delivery)
        if key is None or key == "":
            return []
        return table.live(connection, step.maps_to or "", key, lock=lock)
    else:
        ids = (delivery.workflow_ids.get(name) for name in definition.names)
        travelled = next(filter(None, ids), None)
        found = table.by_id(connection, UUID(travelled), lock=lock) if travelled else None
    return [found] if found else []


def start_of(
    table: StateTable, step: Step, message: Message, delivery: Delivery, *, contested: bool
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
        if contested and (other := table.any(outbox.database(), step.maps_to, key)):
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


def waiting_key(
    table: StateTable,
    definition: WorkflowDefinition,
    step: Step | None,
    message: Message,
    delivery: Delivery,
) -> str:
    """What the message is to wait under, if its step lets it and it has not waited before."""
    if step is None or not step.waits or not step.maps_to or delivery.part or delivery.waits_for:
        return ""
    key = key_of(step, message, delivery)
    if key is None or key == "" or table.any(outbox.database(), step.maps_to, key):
        return ""
    return parking.key_for(definition, step.maps_to, table.converted(step.maps_to, key))


def park(
    table: StateTable,
    definition: WorkflowDefinition,
    message: Message,
    delivery: Delivery,
    key: str,
) -> Target | Ignored | Parked | list[WorkflowState]:
    """Let the message wait, unless its instance is there by the time the key is ours."""
    parking.lock([key])
    step = definition.step_of(message)
    if step and step.waits and not matching(table, definition, step, message, delivery):
        return Parked(key, step.waits)
    return find(table, definition, message, delivery, contested=False)


def missing(
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
            other = table.any(outbox.database(), step.maps_to or "", key)
            if other is not None:
                return ended(definition, other)
    reason = f"No instance of {definition.name} matches {name} by {sought}."
    if step and (step.if_missing == "fail" or (step.waits and step.waits.then == "fail")):
        raise InstanceRequired(f"{reason} Replay the delivery once there is one.")
    if step and step.if_missing == "retry":
        raise InstanceMissing(reason)
    logger.warning("%s The message is ignored.", reason)
    return Ignored(reason)
