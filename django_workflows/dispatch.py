"""One delivery, from claim to end. Read it from the top: what is called stands below."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

from django.db import transaction

from django_workflows import (
    compensation,
    conf,
    leases,
    masking,
    observing,
    outbox,
    recovery,
    registry,
    signals,
    statements,
    telling,
)
from django_workflows.declarations import Errors, Recovery, WorkflowDefinition
from django_workflows.endings import (
    Conflicted,
    Ending,
    Failed,
    Handled,
    Ignored,
    Interrupted,
    Later,
    Lost,
    Parked,
    Unknown,
)
from django_workflows.errors import LeaseLost, RetryLater, UnknownName
from django_workflows.instances import DuplicateInstance
from django_workflows.models import Delivery, Lifecycle, Status
from django_workflows.running import read, run_once
from django_workflows.stale import close_stale_connections

logger = logging.getLogger(__name__)


def deliver(delivery_id: UUID, *, interruptions: Errors = ()) -> Ending | None:
    """Handle one delivery, if it is due and nobody else has it. Never raises.

    Returns how it ended, or None when it could not be claimed. `interruptions` are the errors
    that an orderly shutdown raises in the thread; they use up no attempt. Needs no transaction;
    opens its own. When the database cannot be reached, the lease runs out and the relay has it.
    """
    close_stale_connections()
    delivery = None
    try:
        delivery = claim(delivery_id)
        if delivery is None:
            return None
        with leases.held(delivery):
            ending = handle(delivery, interruptions)
        announce(delivery, ending)
    except BaseException:
        facts = observing.facts_of(delivery) if delivery else {"delivery_id": str(delivery_id)}
        logger.exception("Delivery %s is left to the relay.", delivery_id, extra=facts)
        return None
    else:
        return ending
    finally:
        close_stale_connections()


def claim(delivery_id: UUID) -> Delivery | None:
    """Make the delivery ours for a lease, in a transaction of its own."""

    def claim_it(_conflicts: int) -> list[Delivery]:
        with outbox.database().cursor() as cursor:
            return statements.claim(cursor, [delivery_id], conf.current().LEASE)

    claimed = recovery.persistently(claim_it)
    return claimed[0] if claimed else None


def handle(delivery: Delivery, interruptions: Errors) -> Ending:
    """Run it and record how it ended, in view of those who observe."""
    if not observing.observers:
        return settle(delivery, run(delivery, interruptions))
    with observing.handling(delivery) as watched:
        ending = settle(delivery, run(delivery, interruptions, watched.conflicted))
        watched.ended(ending)
    return ending


def unwatched(_conflict: BaseException) -> None: ...


def run(
    delivery: Delivery,
    interruptions: Errors,
    conflicted: Callable[[BaseException], None] = unwatched,
) -> Ending:
    """Run it until it is committed, or something other than a conflict stops it."""
    conflicts, contested = 0, False
    while True:
        try:
            return run_once(delivery, conflicts, contested=contested)
        except LeaseLost:
            return Lost()
        except UnknownName as error:
            return Unknown(error)
        except RetryLater as error:
            return Later(error)
        except interruptions:
            return Interrupted()
        except DuplicateInstance as error:
            if contested:
                return Failed(error.__cause__ or error, conflicts)
            conflicts, contested = conflicts + 1, True
            conflicted(error)
        except BaseException as error:
            if not recovery.is_conflict(error):
                return Failed(error, conflicts)
            conflicts += 1
            conflicted(error)
            if conflicts == recovery.TRIES_IN_PLACE:
                return Conflicted(error, conflicts)
            recovery.wait_out(error, conflicts)


def settle(delivery: Delivery, ending: Ending) -> Ending:
    """Decide, and record, what becomes of the delivery."""
    settings = conf.current()
    match ending:
        case Handled() | Ignored() | Parked():
            return ending  # recorded in the transaction of its effects
        case Lost():
            return what_the_row_says(delivery, ending)
        case Interrupted():
            recorded = release(delivery, timedelta(0), "The worker was shut down.", held_up=False)
        case Later(error):
            reason = recovery.record_of(error, 0).error
            recorded = release(delivery, error.delay, reason, held_up=False)
        case Unknown(error) if recovery.held_up_for(delivery) < settings.UNKNOWN_LIMIT:
            wait = min(recovery.held_up_for(delivery), timedelta(minutes=1))
            recorded = release(delivery, wait + settings.RELAY_EVERY, str(error))
        case Unknown(error):
            ending, recorded = Failed(error), record_failure(delivery, error, None, 0)
        case Conflicted(error, conflicts) if (
            recovery.held_up_for(delivery) < settings.CONFLICT_LIMIT
        ):
            reason = recovery.record_of(error, delivery.attempts).error
            recorded = release(delivery, recovery.pause_after_conflicts(), reason, conflicts)
        case Conflicted(error, conflicts) | Failed(error, conflicts):
            again = recovery.retry_after(delivery, error, declared_for(delivery))
            ending, recorded = Failed(error), record_failure(delivery, error, again, conflicts)
    return ending if recorded else what_the_row_says(delivery, ending)


def release(
    delivery: Delivery,
    after: timedelta,
    reason: str,
    conflicts: int = 0,
    *,
    held_up: bool = True,
) -> bool:
    """Give it back with no attempt used up. False: it is no longer ours."""

    def release_it(_conflicts: int) -> bool:
        with outbox.database().cursor() as cursor:
            return statements.release(
                cursor, delivery, after=after, reason=reason, conflicts=conflicts, held_up=held_up
            )

    return recovery.persistently(release_it)


def record_failure(
    delivery: Delivery, error: BaseException, retry_after: timedelta | None, conflicts: int
) -> bool:
    """Record the error, and when to try again; None: never. False: it is no longer ours."""
    record = recovery.record_of(error, delivery.attempts + 1)
    logger.error(
        "Attempt %d of %s for %s (delivery %s) failed; %s.",
        delivery.attempts + 1,
        delivery.message_name,
        delivery.handler,
        delivery.id,
        f"the next is in {retry_after}" if retry_after is not None else "it will not be retried",
        exc_info=masking.stand_in(delivery, error),
        extra=observing.facts_of(delivery),
    )
    gives_up = retry_after is None

    def record_it(_conflicts: int) -> bool:
        connection = outbox.database()
        with transaction.atomic(connection.alias), connection.cursor() as cursor:
            if gives_up and delivery.undoes:
                compensation.lock(delivery)  # before the delivery's row, as in every step
            recorded = statements.record_failure(
                cursor,
                delivery,
                retry_after=retry_after,
                failure=record.failure,
                error=record.error,
                error_class=record.error_class,
                traceback=record.traceback,
                conflicts=conflicts,
            )
            if recorded and gives_up:
                failed = copy.copy(delivery)
                failed.attempts += 1
                telling.tell_sender(cursor, failed, record.error)
        return recorded

    recorded = recovery.persistently(record_it)
    if recorded and gives_up:
        delivery.status, delivery.attempts = Status.FAILED, delivery.attempts + 1
    return recorded


def declared_for(delivery: Delivery) -> Recovery:
    """What the step, then its workflow, or the handler says about failures."""
    recipient = registry.current().recipient(delivery.handler)
    if not isinstance(recipient, WorkflowDefinition):
        return recipient.recovery if recipient else Recovery()
    try:
        _recipient, message = read(delivery)
    except Exception:  # of whatever kind: a validator of the message may raise anything
        return recipient.recovery
    step = recipient.step_of(message)
    if delivery.instance_id is None:
        step = recipient.start_of(message) or step
    return step.recovery.otherwise(recipient.recovery) if step else recipient.recovery


def what_the_row_says(delivery: Delivery, ending: Ending) -> Ending:
    """Whether the run was committed, although something was raised after its COMMIT."""
    row = (
        Delivery.objects.using(outbox.database().alias)
        .filter(pk=delivery.pk)
        .values_list("status", "claims")
        .first()
    )
    if row in ((Status.HANDLED, delivery.claims), (Status.IGNORED, delivery.claims)):
        if isinstance(ending, Failed):
            logger.error(
                "Delivery %s was committed; this came after.",
                delivery.id,
                exc_info=masking.stand_in(delivery, ending.error),
                extra=observing.facts_of(delivery),
            )
        return Handled()
    logger.warning(
        "Delivery %s is %s by now: another worker has it, it was cancelled, or it was deleted. "
        "What was done here has been rolled back.",
        delivery.id,
        row[0] if row else "gone",
        extra=observing.facts_of(delivery),
    )
    return Lost()


def announce(delivery: Delivery, ending: Ending) -> None:
    """Send the signals, after the commit; a receiver that raises is logged by Django."""
    recipient = registry.current().recipient(delivery.handler)
    if recipient is None:
        return
    sender = recipient.sender
    match ending:
        case Handled(instance, started):
            delivery.status = Status.HANDLED
            if started:
                signals.workflow_started.send_robust(sender, delivery=delivery, instance=instance)
            signals.delivery_handled.send_robust(sender, delivery=delivery, instance=instance)
            if instance is not None and instance.lifecycle == Lifecycle.COMPLETED:
                signals.workflow_completed.send_robust(sender, delivery=delivery, instance=instance)
        case Failed(error) if delivery.status == Status.FAILED:
            signals.delivery_failed.send_robust(sender, delivery=delivery, error=error)
