"""Steps that wait for each other, and threads that work like workers."""

import threading
from collections.abc import Callable
from uuid import UUID

from django.db import connection, connections

from django_workflows import actors, dispatch, registry
from django_workflows.models import UNENDED, Delivery
from tests.concurrency import at_once, wait_until


class Meeting:
    """Called inside a step: lets the first `parties` calls wait for each other.

    What they do next races for certain. Not on SQLite, where the second step cannot begin before
    the first has ended: there nobody waits.
    """

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)
        self._expected = parties
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if connection.vendor == "sqlite":
            return
        with self._lock:
            self._expected -= 1
            if self._expected < 0:
                return
        self._barrier.wait(20)


def deliver_at_once(*ids: UUID) -> list[object]:
    """Deliver these at the same moment, each on a thread of its own; how each ended."""
    return at_once(*(_delivering(delivery_id) for delivery_id in ids))


def _delivering(delivery_id: UUID) -> Callable[[], object]:
    return lambda: dispatch.deliver(delivery_id)


def work_on_all(threads: int) -> None:
    """Take and deliver what is due, on so many threads, until every delivery has ended."""
    at_once(*[_work] * threads, timeout=200)


def _work() -> None:
    def is_done() -> bool:
        for queue in sorted(registry.current().queues):
            for delivery_id in actors.take(queue, 1):
                dispatch.deliver(delivery_id)
        return not Delivery.objects.filter(status__in=UNENDED).exists()

    wait_until(is_done, timeout=180, every=0.005)


class Background:
    """Runs `target(stop)` on a thread while the block runs; what it raised is raised at the end."""

    def __init__(self, target: Callable[[threading.Event], None]) -> None:
        self._stop = threading.Event()
        self._target = target
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background of a test")

    def _run(self) -> None:
        try:
            self._target(self._stop)
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    def __enter__(self) -> "Background":
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error
