"""Which processes handle and relay deliveries: each says every so often that it is there."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timedelta

from django_workflows import clock, outbox
from django_workflows.models import Worker
from django_workflows.stale import close_stale_connections
from django_workflows.tables import is_unmigrated, refusal

logger = logging.getLogger(__name__)

#: How often a process says that it is there.
EVERY = timedelta(seconds=20)
#: A process that has said nothing for so long is not there any more.
SEEN_LATELY = timedelta(seconds=60)
#: For how long it is remembered that a process was there.
REMEMBERED = timedelta(days=1)


class Presence:
    """That this process is there: one row, written again every `EVERY`."""

    def __init__(self, queues: Iterable[str], *, relays: bool) -> None:
        self.queues = sorted(queues)
        self.relays = relays
        self.started_at: datetime | None = None
        self.next_at = 0.0

    def say(self) -> None:
        """Write it, if it is time; call it as often as you like. It never raises."""
        if time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + EVERY.total_seconds()
        try:
            self._write()
        except Exception as error:
            said = "It could not be noted that this worker is there."
            if is_unmigrated(error):
                logger.warning("%s %s", said, refusal(error))
            else:
                logger.warning(said, exc_info=True)

    def _write(self) -> None:
        connection = outbox.database()
        now = clock.read(connection)
        rows = Worker.objects.using(connection.alias)
        if self.started_at is None:
            self.started_at = now
            rows.filter(seen_at__lt=now - REMEMBERED).delete()
        worker = Worker(
            host=socket.gethostname()[:253],
            pid=os.getpid(),
            queues=self.queues,
            relays=self.relays,
            started_at=self.started_at,
            seen_at=now,
        )
        rows.bulk_create(
            [worker],
            update_conflicts=True,
            unique_fields=["host", "pid"],
            update_fields=["queues", "relays", "started_at", "seen_at"],
        )


def run(stop: threading.Event, presence: Presence) -> None:
    """Say it until told to stop, on this thread's own connection."""
    while True:
        close_stale_connections()
        presence.say()
        close_stale_connections()
        if stop.wait(EVERY.total_seconds()):
            return
