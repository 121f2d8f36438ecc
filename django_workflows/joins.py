"""Joins: a step that runs once when several messages have arrived.

An arrival is its delivery, handled by the join's step: nothing else is written, and the version
of the instance stays. The lock on the instance's row is held while an arrival is counted, so
that the last one sees all the others, and the notice that starts the step has one id per join.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid5

from django.db.backends.utils import CursorWrapper

from django_workflows import outbox, statements
from django_workflows.declarations import Join, Step, WorkflowDefinition
from django_workflows.messages import Message, from_json
from django_workflows.models import Status, WorkflowState
from django_workflows.notices import JoinComplete
from django_workflows.outbox import Origin, Terms


def arrivals(
    cursor: CursorWrapper, definition: WorkflowDefinition, step: Step, instance: WorkflowState
) -> tuple[dict[str, int], bool]:
    """How many messages of each name have arrived, and whether the join was complete before."""
    return statements.arrivals(
        cursor,
        workflows=definition.names,
        instance_id=instance.pk,
        step=step.name,
        notice_id=_notice_id(step, instance),
    )


def complete(
    cursor: CursorWrapper,
    definition: WorkflowDefinition,
    step: Step,
    instance: WorkflowState,
    origin: Origin,
    counts: Mapping[str, int],
) -> None:
    """Send the notice that starts the step, if all that it waits for has arrived."""
    if not _is_complete(definition, step, instance, counts):
        return
    notice = JoinComplete(step=step.name)
    terms = Terms(message_id=_notice_id(step, instance))
    _id, delivery = outbox.prepare_reply(notice, origin, terms, definition, instance.pk)
    outbox.write(cursor, [delivery])


def arrived(definition: WorkflowDefinition, step: Step, instance: WorkflowState) -> list[Message]:
    """The messages that have arrived for the step, oldest first; those that are distinct."""
    join: Join = step.join  # type: ignore[assignment]
    rows = _arrivals(definition, step, join, instance).order_by("pk")
    classes = {name: message for message in join.messages for name in message.stored_names()}
    return join.counted(
        from_json(classes[name], body) for name, body in rows.values_list("message_name", "body")
    )


def _is_complete(
    definition: WorkflowDefinition,
    step: Step,
    instance: WorkflowState,
    counts: Mapping[str, int],
) -> bool:
    join: Join = step.join  # type: ignore[assignment]
    needed = join.needed(instance)
    if needed is None:
        return False
    per_kind = [sum(counts.get(name, 0) for name in m.stored_names()) for m in join.messages]
    if join.count is None:
        return all(per_kind)
    if sum(per_kind) < needed:
        return False
    return not join.distinct or len(arrived(definition, step, instance)) >= needed


def _notice_id(step: Step, instance: WorkflowState) -> UUID:
    """One per join: what it starts is started once."""
    return uuid5(instance.pk, f"join:{step.name}")


def _arrivals(
    definition: WorkflowDefinition, step: Step, join: Join, instance: WorkflowState
) -> Any:
    return outbox.deliveries().filter(
        instance_id=instance.pk,
        handler__in=definition.names,
        step=step.name,
        status=Status.HANDLED,
        message_name__in=[name for m in join.messages for name in m.stored_names()],
    )
