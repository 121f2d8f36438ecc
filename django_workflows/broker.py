"""Brokers: the DatabaseBroker, and RabbitMQ or Redis from a URL with options that are safe.

Imported while the apps are being loaded, so nothing here touches a model.
"""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, close_old_connections, connections
from dramatiq import Broker, Message
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.errors import ConnectionClosed, QueueNotFound

from django_workflows import conf
from django_workflows.tables import is_unmigrated, refusal

#: The name of the one actor: its messages carry the id of a delivery, nothing else.
ACTOR = "django_workflows.deliver"

MIDDLEWARE = [
    "django_dramatiq.middleware.DbConnectionsMiddleware",  # first, so that its after-hooks run last
    "dramatiq.middleware.ShutdownNotifications",
    "dramatiq.middleware.Retries",
    "dramatiq.middleware.CurrentMessage",
]


def dramatiq_settings(url: str) -> dict[str, Any]:
    """The value of DRAMATIQ_BROKER for this URL, with options that lose no wake-up needlessly.

    `db://` is the DatabaseBroker: the database that Django uses, no other server. `redis://` and
    `rediss://` want the extra `redis`, `amqp://` and `amqps://` the extra `rabbitmq`; options in
    the URL's query win over the ones set here. Raises `ImproperlyConfigured` for another scheme, or
    when the extra is not installed.
    """
    if not isinstance(url, str):
        raise ImproperlyConfigured(f"The broker URL is {url!r}: give a text such as 'db://'.")
    scheme = _scheme(url)
    if scheme == "db":
        broker: dict[str, Any] = {"BROKER": "django_workflows.broker.DatabaseBroker", "OPTIONS": {}}
    elif scheme in ("redis", "rediss"):
        _need("redis", "redis", url)
        broker = _redis(url)
    elif scheme in ("amqp", "amqps"):
        _need("pika", "rabbitmq", url)
        broker = _rabbitmq(url)
    else:
        raise ImproperlyConfigured(
            f"The broker URL {without_password(url)!r} has the unknown scheme {scheme!r}. "
            f"Use db://, redis://, rediss://, amqp:// or amqps://."
        )
    return {**broker, "MIDDLEWARE": list(MIDDLEWARE)}


def _scheme(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ImproperlyConfigured(
            f"The broker URL {without_password(url)!r} cannot be read. The port must be a number, "
            f"and special characters of the user and the password percent-encoded."
        ) from None  # whose text may be a part of the password
    return parts.scheme


def _need(package: str, extra: str, url: str) -> None:
    """Raises `ImproperlyConfigured` when the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ImproperlyConfigured(
            f"The broker URL {without_password(url)!r} needs the package {package}: "
            f"pip install 'django-workflows[{extra}]'."
        )


def _redis(url: str) -> dict[str, Any]:
    options = {"socket_timeout": 5, "socket_connect_timeout": 2, "socket_keepalive": True}
    return {
        "BROKER": "dramatiq.brokers.redis.RedisBroker",
        "OPTIONS": {
            "url": _with_defaults(url, options),
            # Messages of a dead worker come back in minutes instead of a quarter of an hour.
            "maintenance_chance": 50_000,
            "heartbeat_timeout": 60_000,
        },
    }


def _rabbitmq(url: str) -> dict[str, Any]:
    options = {
        "heartbeat": 60,
        # A caller's commit waits for all of this, and Dramatiq itself tries up to six times.
        "connection_attempts": 1,
        "socket_timeout": 2,
        "stack_timeout": 5,
        "blocked_connection_timeout": 2,
    }
    return {
        "BROKER": "dramatiq.brokers.rabbitmq.RabbitmqBroker",
        "OPTIONS": {"url": _with_defaults(url, options), "confirm_delivery": True},
    }


def _with_defaults(url: str, options: dict[str, Any]) -> str:
    parts = urlsplit(url)
    query = {**{key: str(value) for key, value in options.items()}, **dict(parse_qsl(parts.query))}
    # Without a host, urlunsplit would leave out the slashes, too.
    return urlunsplit(parts._replace(netloc=parts.netloc or "localhost", query=urlencode(query)))


def without_password(url: str) -> str:
    """As it may be shown: no password, however badly encoded, and no query."""
    return re.sub(r"://([^:@]*):.*@", r"://\1:***@", url, flags=re.DOTALL).partition("?")[0]


Take = Callable[[str, int], Sequence[UUID]]
GiveBack = Callable[[Sequence[UUID]], None]


class DatabaseBroker(Broker):
    """A Dramatiq broker over the table of deliveries: workers need the database and nothing else.

    Its consumers take due deliveries themselves, so nothing is enqueued and no relay runs. The
    app gives it `take` and `give_back` when it is ready. A project's own actors need RabbitMQ
    or Redis.
    """

    def __init__(self, *, middleware: list[Any] | None = None) -> None:
        super().__init__(middleware=middleware)
        self.queues: set[str] = set()
        self.take: Take = _not_ready
        self.give_back: GiveBack = _not_ready
        self._wakes: dict[str, threading.Event] = {}

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self._wakes[queue_name] = threading.Event()
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        return set(self.queues)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Refuse: what this broker carries is in the table already."""
        raise ImproperlyConfigured(
            f"The actor {message.actor_name!r} cannot be enqueued on the DatabaseBroker, which "
            f"carries deliveries of django_workflows only. Set BROKER_URL to redis:// or amqp://, "
            f"or declare a command with a handler instead."
        )

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> Consumer:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)  # type: ignore[no-untyped-call]
        return _DatabaseConsumer(self, queue_name, prefetch, timeout, self._wakes[queue_name])

    def wake(self, queue_name: str) -> None:
        """Let this process's consumer of the queue look at once."""
        if queue_name in self._wakes:
            self._wakes[queue_name].set()

    def flush(self, queue_name: str) -> None:
        """Nothing to drop: what waits is in the table, and stays there."""

    def flush_all(self) -> None:
        """Nothing to drop: what waits is in the table, and stays there."""


class _DatabaseConsumer(Consumer):
    """Takes at most `prefetch` deliveries that are not yet acknowledged."""

    def __init__(
        self,
        broker: DatabaseBroker,
        queue_name: str,
        prefetch: int,
        timeout: int,
        wake: threading.Event,
    ) -> None:
        self.broker = broker
        self.queue_name = queue_name
        self.prefetch = prefetch
        self.timeout = timeout / 1000
        self.wake = wake
        self.taken: deque[UUID] = deque()
        self.in_flight: set[str] = set()
        self.more = False
        self.looked_at = 0.0

    def __next__(self) -> MessageProxy | None:
        if not self.taken:
            self._look()
        if self.taken:
            return MessageProxy(_message(self.queue_name, self.taken.popleft()))
        return None

    def _look(self) -> None:
        """Take what there is room for: at once if there is more, else when woken or polling."""
        room = self.prefetch - len(self.in_flight)
        if not self.more or room <= 0:
            wait = self.timeout
            if room > 0:
                poll_every = conf.current().POLL_EVERY.total_seconds()
                wait = min(max(self.looked_at + poll_every - time.monotonic(), 0), self.timeout)
            self.wake.wait(wait)
            self.wake.clear()
            room = self.prefetch - len(self.in_flight)
        if room <= 0:
            return
        self.looked_at = time.monotonic()
        try:
            close_old_connections()
            self.taken.extend(self.broker.take(self.queue_name, room))
        except (DatabaseError, InterfaceError) as error:
            connections.close_all()
            raise _closed(error) from error
        self.in_flight.update(map(str, self.taken))
        self.more = len(self.taken) == room

    def ack(self, message: MessageProxy) -> None:
        self.in_flight.discard(message.args[0])
        if self.more and len(self.in_flight) <= self.prefetch // 2:
            self.wake.set()

    nack = ack

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give back what was taken and not run; called on the main thread at shutdown."""
        try:
            self.broker.give_back([UUID(message.args[0]) for message in messages])
        except (DatabaseError, InterfaceError) as error:
            raise _closed(error) from error

    def close(self) -> None:
        """Give back what no worker has seen, and leave no connection behind."""
        left, self.taken = list(self.taken), deque()
        try:
            self.broker.give_back(left)
        except (DatabaseError, InterfaceError) as error:
            raise _closed(error) from error
        finally:
            connections.close_all()


def _closed(error: Exception) -> ConnectionClosed:
    """What Dramatiq takes as a reason to start the consumer again in a moment."""
    if is_unmigrated(error):
        error = type(error)(refusal(error))
    return ConnectionClosed(error)  # type: ignore[no-untyped-call]


def _message(queue_name: str, delivery_id: UUID) -> Message[Any]:
    return Message(
        queue_name=queue_name,
        actor_name=ACTOR,
        args=(str(delivery_id),),
        kwargs={},
        options={},
    )


def _not_ready(*_args: Any) -> Any:
    raise ImproperlyConfigured(
        "The DatabaseBroker needs the app: add 'django_workflows' to INSTALLED_APPS."
    )
