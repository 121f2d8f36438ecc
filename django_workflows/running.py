"""One run of a delivery: everything that it does commits, or none of it happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import transaction

from django_workflows import outbox, parking, recovery, registry
from django_workflows.context import Effects, HandlerContext, entered
from django_workflows.declarations import Handler, Recipient, WorkflowDefinition
from django_workflows.endings import Handled, Ignored, Parked
from django_workflows.errors import LeaseLost, UnknownName
from django_workflows.finding import Target, find
from django_workflows.finishing import finish, origin_of, require_commit
from django_workflows.instances import StateTable
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Status, WorkflowState
from django_workflows.notices import JoinComplete
from django_workflows.steps import arrive, run_step


def run_once(delivery: Delivery, conflicts: int, *, contested: bool) -> Handled | Ignored | Parked:
    """Read the message and run what it goes to; everything it does commits, or nothing.

    `contested` says that the last run met a unique constraint when it started an instance.
    """
    recipient, message = read(delivery)
    if isinstance(recipient, WorkflowDefinition):
        with one_transaction():
            return run_workflow(delivery, recipient, message, conflicts, contested=contested)
    if recipient.atomic:
        with one_transaction():
            effects = call_handler(delivery, recipient, message)
            return finish_handler(delivery, effects, conflicts)
    effects = call_handler(delivery, recipient, message)
    return stored_in_the_end(partial(finish_handler, delivery, effects))


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


def one_transaction() -> Any:
    """The transaction of one run; what it does is on disk when it ends."""
    return transaction.atomic(using=outbox.database().alias, durable=True)


# A plain handler


def call_handler(delivery: Delivery, handler: Handler, message: Message) -> Effects:
    effects = Effects()
    origin = origin_of(delivery, handler.name)
    context = HandlerContext(delivery, origin, effects)
    with entered(context):
        handler.function(message, context)
    return effects


def finish_handler(delivery: Delivery, effects: Effects, conflicts: int) -> Handled:
    require_commit()
    outbox.write(effects.outgoing)
    finish(delivery, status=Status.HANDLED, conflicts=conflicts)
    return Handled()


def stored_in_the_end(store: Callable[[int], Handled]) -> Handled:
    """Commit what a handler without a transaction has sent; a conflict does not run it again."""
    for conflicts in range(recovery.TRIES_IN_PLACE):
        try:
            with one_transaction():
                return store(conflicts)
        except Exception as error:
            if not recovery.is_conflict(error) or conflicts + 1 == recovery.TRIES_IN_PLACE:
                raise
            recovery.wait_out(error, conflicts + 1)
    raise AssertionError("unreachable")


# A workflow


def run_workflow(
    delivery: Delivery,
    definition: WorkflowDefinition,
    message: Message,
    conflicts: int,
    *,
    contested: bool,
) -> Handled | Ignored | Parked:
    table = StateTable.of(outbox.database(), definition.state)
    match find(table, definition, message, delivery, contested=contested):
        case Target(step, instance) if step.join and not isinstance(message, JoinComplete):
            return arrive(delivery, definition, step, instance, conflicts)
        case Target() as target:
            return run_step(delivery, definition, message, table, target, conflicts)
        case Ignored() as ignored:
            finish(
                delivery,
                status=Status.IGNORED,
                reason=ignored.reason,
                instance_id=ignored.instance_id,
                conflicts=conflicts,
            )
            return ignored
        case Parked() as parked:
            if not parking.park(delivery, parked.key, parked.how_long):
                raise LeaseLost(f"Delivery {delivery.id} was given to another worker.")
            return parked
        case several:
            return deliver_to_each(delivery, several, conflicts)


def deliver_to_each(delivery: Delivery, instances: list[WorkflowState], conflicts: int) -> Handled:
    """One copy of the delivery for each of several matching instances."""
    outbox.write([outbox.copy_for(delivery, instance.pk) for instance in instances])
    reason = f"Delivered to each of {len(instances)} instances."
    finish(delivery, status=Status.HANDLED, reason=reason, conflicts=conflicts)
    return Handled(reason=reason)
