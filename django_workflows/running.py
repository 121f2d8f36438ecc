"""One run of a delivery: everything that it does commits, or none of it happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.backends.utils import CursorWrapper

from django_workflows import outbox, recovery, registry, statements
from django_workflows.context import Context, Effects, HandlerContext, entered
from django_workflows.endings import Handled, Ignored
from django_workflows.errors import LeaseLost, UnknownName, WorkflowsError
from django_workflows.finding import Target, find
from django_workflows.instances import StateTable, difference
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Status, WorkflowState
from django_workflows.outbox import Origin
from django_workflows.registry import Handler, Recipient, WorkflowDefinition


def run_once(delivery: Delivery, conflicts: int, *, contested: bool) -> Handled | Ignored:
    """Read the message and run what it goes to; everything it does commits, or nothing.

    `contested` says that the last run met a unique constraint when it started an instance.
    """
    recipient, message = read(delivery)
    if isinstance(recipient, WorkflowDefinition):
        with one_transaction() as cursor:
            return run_workflow(
                cursor, delivery, recipient, message, conflicts, contested=contested
            )
    if recipient.atomic:
        with one_transaction() as cursor:
            effects = call_handler(delivery, recipient, message)
            return finish_handler(cursor, delivery, effects, conflicts)
    effects = call_handler(delivery, recipient, message)
    return stored_in_the_end(delivery, effects)


def read(delivery: Delivery) -> tuple[Recipient, Message]:
    """What the delivery goes to, and its message."""
    recipient = registry.current().recipient(delivery.handler)
    if recipient is None:
        raise UnknownName(
            f"No handler or workflow is named {delivery.handler}. If it was renamed, add the old "
            f"name to its aliases, then replay."
        )
    message_class = registry.message_of(recipient, delivery.message_name)
    if message_class is None:
        raise UnknownName(
            f"{delivery.handler} handles no message named {delivery.message_name}. If the message "
            f"was renamed, add the old name to its aliases, then replay."
        )
    return recipient, from_json(message_class, delivery.body)


@contextmanager
def one_transaction() -> Iterator[CursorWrapper]:
    """The transaction of one run, on disk when it ends, and a cursor for what the engine does."""
    connection = outbox.database()
    with transaction.atomic(connection.alias, durable=True), connection.cursor() as cursor:
        yield cursor


# A plain handler


def call_handler(delivery: Delivery, handler: Handler, message: Message) -> Effects:
    effects = Effects()
    origin = origin_of(delivery, handler.name)
    context = HandlerContext(delivery, origin, effects, atomic=handler.atomic)
    with entered(context):
        handler.function(message, context)
    return effects


def finish_handler(
    cursor: CursorWrapper, delivery: Delivery, effects: Effects, conflicts: int
) -> Handled:
    require_commit(cursor)
    outbox.write(cursor, effects.outgoing)
    finish(cursor, delivery, status=Status.HANDLED, conflicts=conflicts)
    return Handled()


def stored_in_the_end(delivery: Delivery, effects: Effects) -> Handled:
    """Commit what a handler without a transaction has sent; a conflict does not run it again."""
    for conflicts in range(recovery.TRIES_IN_PLACE):
        try:
            with one_transaction() as cursor:
                return finish_handler(cursor, delivery, effects, conflicts)
        except Exception as error:
            if not recovery.is_conflict(error) or conflicts + 1 == recovery.TRIES_IN_PLACE:
                raise
            recovery.wait_out(error, conflicts + 1)
    raise AssertionError("unreachable")


# A workflow


def run_workflow(
    cursor: CursorWrapper,
    delivery: Delivery,
    definition: WorkflowDefinition,
    message: Message,
    conflicts: int,
    *,
    contested: bool,
) -> Handled | Ignored:
    table = StateTable.of(cursor.db, definition.state)
    match find(cursor, table, definition, message, delivery, contested=contested):
        case Target() as target:
            return run_step(cursor, delivery, definition, message, table, target, conflicts)
        case Ignored() as ignored:
            finish(
                cursor,
                delivery,
                status=Status.IGNORED,
                reason=ignored.reason,
                instance_id=ignored.instance_id,
                conflicts=conflicts,
            )
            return ignored
        case several:
            return deliver_to_each(cursor, delivery, several, conflicts)


def deliver_to_each(
    cursor: CursorWrapper, delivery: Delivery, instances: list[WorkflowState], conflicts: int
) -> Handled:
    """One copy of the delivery for each of several matching instances."""
    outbox.write(cursor, [outbox.copy_for(delivery, instance.pk) for instance in instances])
    reason = f"Delivered to each of {len(instances)} instances."
    finish(cursor, delivery, status=Status.HANDLED, reason=reason, conflicts=conflicts)
    return Handled(reason=reason)


def run_step(
    cursor: CursorWrapper,
    delivery: Delivery,
    definition: WorkflowDefinition,
    message: Message,
    table: StateTable,
    target: Target,
    conflicts: int,
) -> Handled:
    """Call the step, then write in this order: state, cancelled, sent, the mark of the end."""
    effects = Effects()
    step, instance = target.step, target.instance
    origin = origin_of(delivery, definition.name, step.name, instance)
    context: Context = definition.context_class(delivery, origin, effects, instance, definition)
    with entered(context):
        definition.run(step, message, context)
    require_commit(cursor)
    changes = save(cursor, table, target, effects)
    if not effects.discarded:
        cancel(cursor, delivery, definition, instance, effects)
    outbox.write(cursor, effects.outgoing)
    exists = not (step.starts and effects.discarded)
    finish(
        cursor,
        delivery,
        status=Status.HANDLED,
        reason="The step discarded its changes." if effects.discarded else "",
        instance_id=instance.pk if exists else None,
        step=step.name,
        version=instance.version if exists else None,
        changes=changes,
        conflicts=conflicts,
    )
    return Handled(instance if exists else None, started=step.starts and exists)


def save(cursor: CursorWrapper, table: StateTable, target: Target, effects: Effects) -> str | None:
    """Write the instance if the step changed it or did anything; what it changed, as JSON."""
    if effects.discarded:
        return None
    instance = target.instance
    changed = table.changed(instance, target.before)
    if effects.ending:
        instance.lifecycle = effects.ending
    if target.step.starts:
        table.insert(cursor, instance)
    elif changed or effects.sent or effects.cancelled or effects.ending:
        # The version moves on even if only something was sent: two copies cannot both commit.
        table.update(cursor, instance, changed)
    return difference(instance, target.before, changed)


def cancel(
    cursor: CursorWrapper,
    delivery: Delivery,
    definition: WorkflowDefinition,
    instance: WorkflowState,
    effects: Effects,
) -> None:
    """Cancel what the instance has waiting for itself: of some names, or all at its end."""
    if not effects.cancelled and not effects.ending:
        return
    if effects.ending:
        effects.outgoing[:] = [d for d in effects.outgoing if d.instance_id != instance.pk]
    statements.cancel(
        cursor,
        workflow=definition.name,
        instance_id=instance.pk,
        names=None if effects.ending else sorted(effects.cancelled),
        kept=[delivery.id] if effects.ending else [delivery.id, *effects.sent],
        reason=f"Cancelled by {definition.name}.",
    )


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
    )


def finish(cursor: CursorWrapper, delivery: Delivery, *, status: Status, **facts: Any) -> None:
    """The mark, in the transaction of the effects. Raises `LeaseLost` when it is not ours."""
    require_commit(cursor)
    if not statements.finish(cursor, delivery, status=str(status), **facts):
        raise LeaseLost(f"Delivery {delivery.id} was given to another worker, or cancelled.")


def require_commit(cursor: CursorWrapper) -> None:
    """Raise when Django would roll back without an exception: nothing would have been handled."""
    if cursor.db.get_rollback():
        raise WorkflowsError(
            "A database error was caught inside the transaction without a savepoint, so nothing "
            "can be committed. Wrap what may fail in transaction.atomic()."
        )
