"""Hand due deliveries to the workers: the safety net, the delays, the retries, the dead workers."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from uuid import UUID

from django.db import close_old_connections, transaction

from django_workflows import conf, observing, outbox, registry, signals, statements, telling
from django_workflows.models import Delivery, Status
from django_workflows.statements import Taken
from django_workflows.tables import is_unmigrated, refusal

logger = logging.getLogger(__name__)

#: Seconds between two looks for deliveries on queues that nothing consumes any more.
ORPHANS_EVERY = 60.0


def take(queue: str, limit: int, *, grows: bool = False, orphans: bool = False) -> list[Taken]:
    """Take due rows of a queue, in a transaction of its own; what may be run now.

    Rows of dead workers become pending again, or fail. With `orphans`, the rows on queues that
    nothing declares any more are taken instead.
    """
    settings = conf.current()
    connection = outbox.database()
    orphans_of = sorted(registry.current().queues) if orphans else None
    with connection.cursor() as cursor:
        if not statements.is_any_due(cursor, queue=queue, orphans_of=orphans_of):
            return []
    with transaction.atomic(connection.alias), connection.cursor() as cursor:
        taken = statements.take_due(
            cursor,
            queue=queue,
            limit=limit,
            lease=settings.LEASE,
            losses=settings.LOSSES,
            backoff=settings.BACKOFF,
            backoff_factor=settings.BACKOFF_FACTOR,
            backoff_max=settings.BACKOFF_MAX,
            grows=grows,
            orphans_of=orphans_of,
        )
        lost = [row.id for row in taken if row.status == Status.FAILED]
        failed = Delivery.objects.using(connection.alias).in_bulk(lost) if lost else {}
        for delivery in failed.values():
            telling.tell_sender(cursor, delivery, delivery.error)
    for delivery in failed.values():
        announce_failure(delivery)
    return [row for row in taken if row.is_due]


def give_back(ids: Sequence[UUID]) -> None:
    """Let other consumers have rows that were taken and not run."""
    if ids:
        with outbox.database().cursor() as cursor:
            statements.make_due_now(cursor, ids)


def announce_failure(delivery: Delivery) -> None:
    """Say that a delivery has cost too many workers."""
    facts = observing.facts_of(delivery)
    logger.error("Delivery %s has failed: %s", delivery, delivery.reason, extra=facts)
    recipient = registry.current().recipient(delivery.handler)
    if recipient is not None:
        signals.delivery_failed.send_robust(recipient.sender, delivery=delivery, error=None)


def relay_once(*, orphans: bool = False) -> int:
    """Hand over one batch of each queue; how many deliveries that were.

    The rows are taken and committed first: no lock is held while the network is waited for.
    Nothing is taken while the transport rests after a failure.
    """
    count = 0
    if not outbox.transport.hands_over:
        return count
    batch = conf.current().RELAY_BATCH
    for queue in sorted(registry.current().queues):
        count += hand_over(take(queue, batch, grows=True))
    if orphans:
        count += hand_over(take("", batch, grows=True, orphans=True))
    return count


def hand_over(taken: Sequence[Taken]) -> int:
    """Give the ids to the transport, each on the queue that its handler is on today.

    Raises what the transport raises, with the rows due again at once.
    """
    declared = registry.current().queues
    by_queue: dict[str, list[UUID]] = defaultdict(list)
    for row in taken:
        by_queue[row.queue if row.queue in declared else conf.current().QUEUE].append(row.id)
    try:
        for queue, ids in by_queue.items():
            outbox.transport.hand_over(queue, ids)
    except Exception:
        give_back([row.id for row in taken])
        raise
    return len(taken)


def run(stop: threading.Event) -> None:
    """Relay until told to stop; a database or broker that is down is waited for."""
    is_down = False
    next_orphans = 0.0
    while not stop.is_set():
        close_old_connections()
        count = 0
        try:
            look_for_orphans = time.monotonic() >= next_orphans
            count = relay_once(orphans=look_for_orphans)
            if look_for_orphans:
                next_orphans = time.monotonic() + ORPHANS_EVERY
            if is_down:
                logger.info("The relay works again.")
            is_down = False
        except Exception as error:
            said = "The relay could not hand over deliveries; it goes on trying."
            if is_unmigrated(error) and not is_down:
                logger.error("%s %s", said, refusal(error))
            else:
                log = logger.debug if is_down else logger.exception
                log(said)
            is_down = True
        close_old_connections()
        if count < conf.current().RELAY_BATCH:
            stop.wait(conf.current().RELAY_EVERY.total_seconds())
