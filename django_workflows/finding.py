"""Which instance a message is for, and which step of the workflow runs on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from django_workflows import masking, observing, parking
from django_workflows.declarations import Step, WorkflowDefinition
from django_workflows.endings import Ignored, Parked
from django_workflows.errors import InstanceMissing, InstanceRequired, LookupMismatch, UnknownName
from django_workflows.instances import StateTable, key_of
from django_workflows.messages import Message
from django_workflows.models import Delivery, WorkflowState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """One run of a delivery to a workflow, in its transaction."""

    cursor: CursorWrapper
    delivery: Delivery
    definition: WorkflowDefinition
    message: Message
    table: StateTable
    #: How many runs before this one met a conflict.
    conflicts: int
    #: Whether the last of them met a unique constraint when it started an instance.
    contested: bool

    def key(self, step: Step) -> Any:
        """The value that the step's lookup gives; None matches nothing, and nor does ''."""
        key = key_of(step, self.message, self.delivery)
        return None if key == "" else key


@dataclass(frozen=True)
class Target:
    """The instance that a step runs on."""

    step: Step
    instance: WorkflowState
    before: dict[str, Any]


Found = Target | Ignored | Parked | list[WorkflowState]


def find(run: Run) -> Found:
    """The instance and step for the message: one to continue, else one to start, else none."""
    step, start = run.definition.step_of(run.message), run.definition.start_of(run.message)
    if step is None and start is None:
        raise UnknownName(
            f"{run.definition.name} has no step for this {type(run.message).stored_name()}: "
            f"perhaps another release has. If it was removed or renamed, put it back, then replay."
        )
    matches = matching(run, step) if step else []
    live = [instance for instance in matches if instance.is_live]
    if len(live) > 1:
        return live
    if step and live:
        return Target(step, live[0], run.table.snapshot(live[0]))
    if start and not run.delivery.part:
        return start_of(run, start)
    if matches:
        return ended(run, matches[0].pk)
    return missing(run, step)


def matching(run: Run, step: Step) -> list[WorkflowState]:
    """The instance this copy or reply is for; else by lookup; else by the id that travelled.

    For a join its row is locked, so that arrivals are counted one after the other.
    """
    lock = step.join is not None
    if run.delivery.part:
        found = run.table.by_id(run.cursor, UUID(run.delivery.part), lock=lock)
    elif step.lookup is not None:
        key = run.key(step)
        if key is None:
            return []
        return run.table.live(run.cursor, step.maps_to or "", key, lock=lock)
    else:
        ids = (run.delivery.workflow_ids.get(name) for name in run.definition.names)
        travelled = next(filter(None, ids), None)
        found = run.table.by_id(run.cursor, UUID(travelled), lock=lock) if travelled else None
    return [found] if found else []


def start_of(run: Run, step: Step) -> Target | Ignored:
    """A new instance; or, once a constraint has refused one, the reason to start none."""
    table = run.table
    instance = table.model()
    before = table.snapshot(instance)
    if run.delivery.sender_instance_id is not None:
        instance.starter_workflow = before["starter_workflow"] = run.delivery.sender
        instance.starter_id = before["starter_id"] = run.delivery.sender_instance_id
    if step.maps_to:
        key = run.key(step)
        if key is None:
            raise LookupMismatch(
                f"{type(run.message).__qualname__} starts one instance per {step.maps_to}, and it "
                f"has no value for it. Give the message a value."
            )
        if run.contested and (other := table.any(run.cursor, step.maps_to, key)):
            return Ignored(f"{table.model._meta.label} {other} has {step.maps_to} {key}.", other)
        field: Any = table.model._meta.get_field(step.maps_to)
        setattr(instance, field.attname, table.converted(step.maps_to, key))
    return Target(step, instance, before)


def missing(run: Run, step: Step | None) -> Found:
    """No live instance matches: ended ones are quiet, the rest is as `if_missing` says."""
    sought = "the workflow id that travelled along"
    if step and step.lookup is not None and not run.delivery.part:
        key = run.key(step)
        sought = f"{step.maps_to} {key!r:.100}"
        if key is not None and (other := run.table.any(run.cursor, step.maps_to or "", key)):
            # It has ended, unless it was created since `find` has looked.
            return find(run) if matching(run, step) else ended(run, other)
        if key is not None and step.waits and not run.delivery.waits_for:
            return park(run, step, key)
    name = type(run.message).stored_name()
    reason = f"No instance of {run.definition.name} matches {name} by {sought}."
    if step and (step.if_missing == "fail" or (step.waits and step.waits.then == "fail")):
        raise InstanceRequired(f"{reason} Replay the delivery once there is one.")
    if step and step.if_missing == "retry":
        raise InstanceMissing(reason)
    facts = observing.facts_of(run.delivery)
    shown = masking.text_of(run.delivery, reason)
    logger.warning("%s The message is ignored.", shown, extra=facts)
    return Ignored(reason)


def park(run: Run, step: Step, key: Any) -> Found:
    """Let the message wait, unless its instance is there by the time that its key is ours."""
    field_name = step.maps_to or ""
    waits_for = parking.key_for(run.definition, field_name, run.table.converted(field_name, key))
    parking.lock(run.cursor, [waits_for])
    if step.waits and not run.table.any(run.cursor, field_name, key):
        return Parked(waits_for, step.waits)
    return find(run)


def ended(run: Run, instance_id: UUID) -> Ignored:
    facts = observing.facts_of(run.delivery, instance_id)
    logger.info(
        "A message for %s %s came after its end.", run.definition.name, instance_id, extra=facts
    )
    return Ignored(f"{run.definition.name} {instance_id} has ended.", instance_id)
