"""The mark that a delivery was handled, in the transaction of its effects."""

from __future__ import annotations

from typing import Any

from django.db.backends.utils import CursorWrapper

from django_workflows import compensation, registry, statements, telling
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import LeaseLost, WorkflowsError
from django_workflows.models import Delivery, Status, WorkflowState
from django_workflows.outbox import Origin


def finish(cursor: CursorWrapper, delivery: Delivery, *, status: Status, **facts: Any) -> None:
    """Set the mark. Raises `LeaseLost` when it is not ours to set."""
    require_commit(cursor)
    if delivery.undoes:
        carry_on_undoing(cursor, delivery)
    if not statements.finish(cursor, delivery, status=str(status), **facts):
        raise LeaseLost(f"Delivery {delivery.id} was given to another worker, or cancelled.")


def require_commit(cursor: CursorWrapper) -> None:
    """Raise when Django would roll back without an exception: nothing would have been handled."""
    if cursor.db.get_rollback():
        raise WorkflowsError(
            "A database error was caught inside the transaction without a savepoint, so nothing "
            "can be committed. Wrap what may fail in transaction.atomic()."
        )


def carry_on_undoing(cursor: CursorWrapper, delivery: Delivery) -> None:
    """An undo command has been handled: the next one leaves, or its instance has ended."""
    ended = compensation.carry_on(delivery)
    definition = registry.current().recipient(delivery.sender)
    if ended and isinstance(definition, WorkflowDefinition):
        origin = origin_of(delivery, definition.name, instance=ended)
        telling.tell_starter(cursor, definition, ended, origin)


def origin_of(
    delivery: Delivery, sender: str, step: str = "", instance: WorkflowState | None = None
) -> Origin:
    """What the messages that are sent while this one is handled inherit from it.

    The ids of the workflows that have seen it travel on; an instance adds its own.
    """
    own = {sender: str(instance.pk)} if instance else {}
    return Origin(
        correlation_id=delivery.correlation_id,
        causation_id=delivery.message_id,
        sticky_attributes=delivery.sticky_attributes,
        workflow_ids={**delivery.workflow_ids, **own},
        sender=sender,
        sender_instance_id=instance.pk if instance else None,
        sender_step=step,
        trace_context=delivery.trace_context,
    )
