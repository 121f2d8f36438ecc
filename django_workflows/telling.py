"""What the engine tells instances: a command of theirs has failed, a child has ended."""

from __future__ import annotations

from typing import cast
from uuid import UUID, uuid5

from django.db.backends.utils import CursorWrapper

from django_workflows import compensation, outbox, registry
from django_workflows.declarations import Notice, WorkflowDefinition
from django_workflows.models import Delivery, Lifecycle, WorkflowState
from django_workflows.notices import CommandFailed, Outcome, WorkflowEnded
from django_workflows.outbox import Origin, Terms


def tell_sender(cursor: CursorWrapper, delivery: Delivery, error: str) -> None:
    """Tell the instance that sent it that a delivery has failed for good.

    In the transaction that makes it failed. An undo command stops the undoing instead.
    """
    if delivery.sender_instance_id is None:
        return
    if delivery.undoes:
        compensation.stop(delivery)
        return
    notice = CommandFailed(
        command=delivery.message_name,
        body=delivery.body,
        delivery_id=delivery.id,
        handler=delivery.handler,
        error=error,
        attempts=delivery.attempts,
        losses=delivery.losses,
    )
    origin = Origin(
        correlation_id=delivery.correlation_id,
        causation_id=delivery.message_id,
        sticky_attributes=delivery.sticky_attributes,
        workflow_ids=delivery.workflow_ids,
        sender=delivery.handler,
        trace_context=delivery.trace_context,
    )
    once = f"failed:{delivery.claims}"  # a replay that fails again is a failure of its own
    _tell(
        cursor,
        delivery.sender,
        delivery.sender_instance_id,
        notice,
        origin,
        uuid5(delivery.id, once),
    )


def tell_starter(
    cursor: CursorWrapper, definition: WorkflowDefinition, instance: WorkflowState, origin: Origin
) -> None:
    """Tell the instance that started this one that it has ended, in the transaction of its end."""
    if instance.starter_id is None:
        return
    notice = WorkflowEnded(
        workflow=definition.name,
        instance_id=instance.pk,
        outcome=cast("Outcome", Lifecycle(instance.lifecycle).value),
    )
    _tell(
        cursor,
        instance.starter_workflow,
        instance.starter_id,
        notice,
        origin,
        uuid5(instance.pk, "ended"),
    )


def _tell(
    cursor: CursorWrapper,
    workflow: str,
    instance_id: UUID,
    notice: Notice,
    origin: Origin,
    once: UUID,
) -> None:
    """Send the notice, if the workflow has a step for it."""
    recipient = registry.current().recipient(workflow)
    if isinstance(recipient, WorkflowDefinition) and recipient.step_of(notice):
        terms = Terms(message_id=once)
        _id, delivery = outbox.prepare_reply(notice, origin, terms, recipient, instance_id)
        outbox.write(cursor, [delivery])
