"""One run of a delivery: everything that it does commits, or none of it happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from django.db.backends.utils import CursorWrapper

from django_workflows import outbox, parking, recovery, registry
from django_workflows.context import Effects, HandlerContext, entered
from django_workflows.declarations import Handler, Recipient, WorkflowDefinition
from django_workflows.endings import Handled, Ignored, Parked
from django_workflows.errors import LeaseLost, UnknownName
from django_workflows.finding import Run, Target, find
from django_workflows.finishing import finish, origin_of, require_commit
from django_workflows.instances import StateTable
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Status, WorkflowState
from django_workflows.steps import run_target


def run_once(delivery: Delivery, conflicts: int, *, contested: bool) -> Handled | Ignored | Parked:
    """Read the message and run what it goes to; everything it does commits, or nothing.

    `contested` says that the last run met a unique constraint when it started an instance.
    """
    recipient, message = read(delivery)
    if isinstance(recipient, WorkflowDefinition):
        with one_transaction() as cursor:
            table = StateTable.of(cursor.db, recipient.state)
            return run_workflow(
                Run(cursor, delivery, recipient, message, table, conflicts, contested)
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
    context = HandlerContext(delivery, origin_of(delivery, handler.name), effects)
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

    def store(conflicts: int) -> Handled:
        with one_transaction() as cursor:
            return finish_handler(cursor, delivery, effects, conflicts)

    return recovery.persistently(store)


# A workflow


def run_workflow(run: Run) -> Handled | Ignored | Parked:
    match find(run):
        case Target() as target:
            return run_target(run, target)
        case Ignored() as ignored:
            finish(
                run.cursor,
                run.delivery,
                status=Status.IGNORED,
                reason=ignored.reason,
                instance_id=ignored.instance_id,
                conflicts=run.conflicts,
            )
            return ignored
        case Parked() as parked:
            if not parking.park(run.delivery, parked.key, parked.how_long):
                raise LeaseLost(f"Delivery {run.delivery.id} was given to another worker.")
            return parked
        case several:
            return deliver_to_each(run, several)


def deliver_to_each(run: Run, instances: list[WorkflowState]) -> Handled:
    """One copy of the delivery for each of several matching instances."""
    outbox.write(run.cursor, [outbox.copy_for(run.delivery, found.pk) for found in instances])
    reason = f"Delivered to each of {len(instances)} instances."
    finish(
        run.cursor,
        run.delivery,
        status=Status.HANDLED,
        reason=reason,
        conflicts=run.conflicts,
    )
    return Handled(reason=reason)
