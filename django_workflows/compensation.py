"""Undoing: commands noted with an instance, sent newest first, each when the one before is handled.

A note is a delivery of status `noted`: it commits with the step that did the thing, and is sent
by making it pending.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from django_workflows import clock, outbox, registry, statements
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import UnknownName
from django_workflows.models import (
    UNENDED,
    Delivery,
    Lifecycle,
    Status,
    WorkflowState,
)
from django_workflows.statements import NewDelivery

logger = logging.getLogger(__name__)


def note(cursor: CursorWrapper, notes: Sequence[NewDelivery], version: int) -> None:
    """Keep undo commands of the step that led to this version of its instance."""
    if notes:
        statements.insert_notes(cursor, notes, version)


def forget(ids: Sequence[UUID]) -> None:
    """Drop notes of a step that has discarded what it did."""
    if ids:
        outbox.deliveries().filter(pk__in=ids, status=Status.NOTED).delete()


def is_noted(instance: WorkflowState) -> bool:
    """Whether the instance has anything to undo."""
    return bool(_notes_of(instance.pk).exists())


def send_next(instance_id: Any) -> bool:
    """Send the newest of the noted commands. False: there is none left."""
    newest = _notes_of(instance_id).order_by("-version", "-pk").first()
    if newest is None:
        return False
    now = clock.read(outbox.database())
    _notes_of(instance_id).filter(pk=newest.pk).update(
        status=Status.PENDING, due_at=now, relay_at=now + outbox.second_look()
    )
    outbox.hand_over_on_commit({newest.queue: [newest.pk]})
    return True


def carry_on(delivery: Delivery) -> WorkflowState | None:
    """An undo command has been handled: send the next, or end the instance, which is returned.

    In the transaction of the handling. Raises `UnknownName` when this process does not have the
    workflow.
    """
    state = _state_of(delivery)
    undoing = outbox.instances(state).filter(
        pk=delivery.sender_instance_id,
        lifecycle__in=(Lifecycle.COMPENSATING, Lifecycle.FAILED),
    )
    # A step of the instance that is about to note something comes before this, or after it.
    if not list(undoing.select_for_update()):
        return None  # it was replayed by hand, and the instance undoes nothing
    if _is_undoing(delivery):
        return None  # another undo command is on its way, and carries on after it
    if send_next(delivery.sender_instance_id):
        undoing.filter(lifecycle=Lifecycle.FAILED).update(lifecycle=Lifecycle.COMPENSATING)
        return None
    now = clock.read(outbox.database())
    if undoing.update(lifecycle=Lifecycle.COMPENSATED, ended_at=now):
        ended: WorkflowState = outbox.instances(state).get(pk=delivery.sender_instance_id)
        return ended
    return None


def lock(delivery: Delivery) -> None:
    """Keep steps of the undo command's instance out until the end of the transaction.

    Not of a workflow that this process does not have: what is to be recorded must be all the same.
    """
    with suppress(UnknownName):
        rows = outbox.instances(_state_of(delivery)).filter(pk=delivery.sender_instance_id)
        list(rows.select_for_update())


def stop(delivery: Delivery) -> None:
    """An undo command has failed for good: the instance is failed, until a replay of it works.

    Never raises for a workflow that this process does not have: the failure must be recorded.
    """
    try:
        state = _state_of(delivery)
    except UnknownName:
        logger.exception("The instance of a failed undo command cannot be marked as failed.")
        return
    outbox.instances(state).filter(
        pk=delivery.sender_instance_id, lifecycle=Lifecycle.COMPENSATING
    ).update(lifecycle=Lifecycle.FAILED)


def _is_undoing(delivery: Delivery) -> bool:
    """Whether another undo command of the instance is still to be handled."""
    others = outbox.deliveries().filter(
        sender_instance_id=delivery.sender_instance_id, undoes=True, status__in=UNENDED
    )
    return bool(others.exclude(pk=delivery.pk).exists())


def _notes_of(instance_id: Any) -> Any:
    return outbox.deliveries().filter(
        sender_instance_id=instance_id, undoes=True, status=Status.NOTED
    )


def _state_of(delivery: Delivery) -> type[WorkflowState]:
    definition = registry.current().recipient(delivery.sender)
    if not isinstance(definition, WorkflowDefinition):
        raise UnknownName(
            f"No workflow is named {delivery.sender}, which noted {delivery.message_name} to be "
            f"undone with. If it was renamed, add the old name to its aliases, then replay."
        )
    return definition.state
