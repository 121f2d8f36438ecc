"""The Dramatiq side: one actor, and a middleware that keeps a worker process honest."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import dramatiq
from django.db import close_old_connections
from dramatiq import Broker, Message, Middleware, Worker
from dramatiq.middleware import Shutdown

from django_workflows import conf, dispatch, leases, observing, outbox, registry, relay, workers
from django_workflows.broker import ACTOR, DatabaseBroker
from django_workflows.errors import BrokerResting
from django_workflows.workers import Presence

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether the process is still whole.
WATCH_EVERY = 5.0
#: Seconds that an orderly end may take before the process is ended without one.
LAST_WORD = 60.0
#: Seconds for which a broker that refused a hand-over is left to the relay.
BROKER_PAUSE = 5.0


def install(broker: Broker | None = None) -> None:
    """Declare the actor, its queues and the middleware on the broker, and send through it.

    Without one it is Dramatiq's global broker, which django-dramatiq has set.
    """
    broker = broker or dramatiq.get_broker()
    options: dict[str, Any] = {"max_retries": 0, "time_limit": float("inf")}
    known = {name: value for name, value in options.items() if name in broker.actor_options}
    queue = conf.current().QUEUE
    dramatiq.actor(broker=broker, actor_name=ACTOR, queue_name=queue, **known)(deliver)
    for queue in sorted(registry.current().queues):
        broker.declare_queue(queue)
    if not any(isinstance(middleware, WorkflowsMiddleware) for middleware in broker.middleware):
        broker.add_middleware(WorkflowsMiddleware())
    if isinstance(broker, DatabaseBroker):
        broker.take, broker.give_back = take, relay.give_back
        outbox.transport = DatabaseTransport(broker)
    else:
        outbox.transport = DramatiqTransport(broker)


def deliver(delivery_id: str) -> None:
    """The actor. It never raises: what becomes of the delivery is in its row."""
    dispatch.deliver(UUID(delivery_id), interruptions=(Shutdown,))


class DatabaseTransport:
    """Nothing is handed over; this process's own consumers are told to look."""

    hands_over = False

    def __init__(self, broker: DatabaseBroker) -> None:
        self.broker = broker

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None:
        self.broker.wake(queue)


class DramatiqTransport:
    """Enqueues one message per delivery on RabbitMQ or Redis. It carries the id, nothing else.

    A broker that does not answer is left alone for a moment, so that not every request waits
    for it in vain; the relay hands over what that leaves behind.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.paused_until = 0.0

    @property
    def hands_over(self) -> bool:
        return time.monotonic() >= self.paused_until

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None:
        if not self.hands_over:
            raise BrokerResting(f"The broker failed less than {BROKER_PAUSE} s ago.")
        try:
            for delivery_id in ids:
                self.broker.enqueue(_message(queue, delivery_id))
        except Exception:
            self.paused_until = time.monotonic() + BROKER_PAUSE
            raise


def take(queue: str, limit: int) -> list[UUID]:
    """Due deliveries for a consumer of the DatabaseBroker; the default queue's has orphans too."""
    taken = relay.take(queue, limit)
    if not taken and queue == conf.current().QUEUE and _orphans_are_due():
        taken = relay.take(queue, limit, orphans=True)
    return [row.id for row in taken]


_next_orphans = 0.0


def _orphans_are_due() -> bool:
    """Whether it is time to look for rows on queues that nothing declares any more."""
    global _next_orphans
    if time.monotonic() < _next_orphans:
        return False
    _next_orphans = time.monotonic() + relay.ORPHANS_EVERY
    return True


def _message(queue: str, delivery_id: UUID) -> Message[None]:
    return Message(
        queue_name=queue, actor_name=ACTOR, args=(str(delivery_id),), kwargs={}, options={}
    )


class WorkflowsMiddleware(Middleware):
    """Runs, in every worker process, the relay, the extension of leases, and the watchdog."""

    def __init__(self) -> None:
        self.stop_relay = threading.Event()
        self.stop_rest = threading.Event()

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self.stop_relay, self.stop_rest = threading.Event(), threading.Event()
        if not isinstance(broker, DatabaseBroker):
            _start("relay", relay.run, self.stop_relay)
        _start("leases", extend_leases, self.stop_rest, presence_of(worker))
        _start("watchdog", watch, worker, os.getppid(), self.stop_relay)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.stop_relay.set()  # leases are extended until the last step has ended

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self.stop_rest.set()
        observing.stopping()


def presence_of(worker: Worker) -> Presence:
    """What this process says of itself; on the DatabaseBroker consumers look for what is due."""
    queues = {queue for queue in worker.consumers if not queue.endswith((".DQ", ".XQ"))}
    return Presence(queues, relays=True)


def extend_leases(stop: threading.Event, presence: Presence | None = None) -> None:
    """Extend this process's leases, and say that it is there, until told to stop."""
    if presence is not None:
        presence.say()
        close_old_connections()
    while not stop.wait(min(conf.current().LEASE / 3, workers.EVERY).total_seconds()):
        close_old_connections()
        try:
            leases.extend()
        except Exception:
            logger.warning("The leases could not be extended; trying again.", exc_info=True)
        if presence is not None:
            presence.say()
        close_old_connections()


def watch(worker: Worker, parent: int, stop: threading.Event) -> None:
    """End the process when a thread of it has died, or its master has, so that it is restarted."""
    while not stop.wait(WATCH_EVERY):
        dead = [t for t in (*worker.workers, *worker.consumers.values()) if not t.is_alive()]
        if stop.is_set():
            return
        if dead:
            end_process(f"{len(dead)} of its threads have died ({dead[0].name})")
        elif os.getppid() != parent:
            end_process("its master process has died, and it would go on with old code for ever")


def end_process(reason: str) -> None:
    """Ask this process to end, and end it if it does not."""
    logger.critical("This worker process ends: %s.", reason)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_WORD)
    os._exit(1)


def _start(name: str, target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, name=f"django_workflows {name}", daemon=True).start()
