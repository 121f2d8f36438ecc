"""The leases of what this process is running, extended while it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from django_workflows import conf, observing, outbox, statements
from django_workflows.models import Delivery

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lease:
    delivery: Delivery
    since: float = field(default_factory=time.monotonic)


_held: dict[UUID, _Lease] = {}
_lock = threading.Lock()


@contextmanager
def held(delivery: Delivery) -> Iterator[None]:
    """Have the delivery's lease extended by `extend` while the block runs."""
    lease = _Lease(delivery)
    with _lock:
        _held[delivery.id] = lease
    try:
        yield
    finally:
        with _lock:
            if _held.get(delivery.id) is lease:  # else this process has claimed it once more
                del _held[delivery.id]


def extend() -> None:
    """Extend every lease that this process holds, except of what has run beyond RUN_LIMIT."""
    settings = conf.current()
    with _lock:
        for delivery_id, lease in list(_held.items()):
            if time.monotonic() - lease.since > settings.RUN_LIMIT.total_seconds():
                del _held[delivery_id]
                logger.error(
                    "Delivery %s has run longer than RUN_LIMIT (%s); this worker lets go of it, "
                    "and what it does will not be committed once another has taken it.",
                    delivery_id,
                    settings.RUN_LIMIT,
                    extra=observing.facts_of(lease.delivery),
                )
        tokens = {delivery_id: lease.delivery.claims for delivery_id, lease in _held.items()}
    if tokens:
        with outbox.database().cursor() as cursor:
            statements.extend(cursor, tokens, settings.LEASE)
