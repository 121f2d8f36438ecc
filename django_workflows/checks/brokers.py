"""A project's own broker: options without which it loses or holds up messages.

What `dramatiq_settings` builds has them all. The table repairs what a broker loses, later.
"""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage

from django_workflows import outbox
from django_workflows.checks.reports import Problems, warning

#: One command in so many looks for the messages of dead workers; Dramatiq's default is 1,000.
LEAST_MAINTENANCE = 10_000

_REMEDY = "or build it with django_workflows.broker.dramatiq_settings(url)."


def check_broker(**_kwargs: Any) -> list[CheckMessage]:
    """Looks at the broker that deliveries are handed to, however it was configured."""
    broker: Any = getattr(outbox.transport, "broker", None)
    kinds = {kind.__name__ for kind in type(broker).__mro__}
    found: list[CheckMessage] = []
    if "RabbitmqBroker" in kinds:
        found += rabbitmq(broker)
    if "RedisBroker" in kinds:
        found += redis(broker)
    return found + list(middleware(broker))


def rabbitmq(broker: Any) -> Problems:
    if not broker.confirm_delivery:
        yield warning(
            121,
            "The RabbitmqBroker has no confirm_delivery: what RabbitMQ has not yet written is lost "
            "when it dies.",
            f"Add 'confirm_delivery': True to DRAMATIQ_BROKER['OPTIONS'], {_REMEDY}",
        )
    servers = broker.parameters if isinstance(broker.parameters, list) else [broker.parameters]
    if any(server.heartbeat == 0 for server in servers):
        yield warning(
            122,
            "The RabbitmqBroker has heartbeat 0: a worker on a machine that died keeps its "
            "messages for ever.",
            f"Set the heartbeat to 60 (seconds), in the URL ?heartbeat=60, {_REMEDY}",
        )
    if any(not server.blocked_connection_timeout for server in servers):
        yield warning(
            123,
            "The RabbitmqBroker has no blocked_connection_timeout: while RabbitMQ is short of "
            "memory or disk, every request that sends a message hangs.",
            f"Set blocked_connection_timeout to 2 (seconds), in the URL "
            f"?blocked_connection_timeout=2, {_REMEDY}",
        )


def redis(broker: Any) -> Problems:
    if broker.maintenance_chance < LEAST_MAINTENANCE:
        yield warning(
            124,
            f"The RedisBroker has maintenance_chance {broker.maintenance_chance:,}: messages of a "
            f"dead worker come back after a quarter of an hour.",
            f"Add 'maintenance_chance': 50_000 to DRAMATIQ_BROKER['OPTIONS'], {_REMEDY}",
        )
    if not broker.client.connection_pool.connection_kwargs.get("socket_timeout"):
        yield warning(
            125,
            "The RedisBroker has no socket_timeout: while Redis does not answer, every request "
            "that sends a message hangs.",
            f"Set socket_timeout to 5 (seconds), in the URL ?socket_timeout=5, {_REMEDY}",
        )


def middleware(broker: Any) -> Problems:
    """W126 and W127: what slows workers down, and what drops old messages."""
    by_name = {type(one).__name__: one for one in getattr(broker, "middleware", ())}
    if "AdminMiddleware" in by_name:
        yield warning(
            126,
            "django_dramatiq's AdminMiddleware writes several rows per message and waits for the "
            "sender's transaction: workers are ten times slower.",
            "Remove 'django_dramatiq.middleware.AdminMiddleware' from "
            "DRAMATIQ_BROKER['MIDDLEWARE']; the deliveries are in the admin of django_workflows.",
        )
    if getattr(by_name.get("AgeLimit"), "max_age", None):
        yield warning(
            127,
            "Dramatiq's AgeLimit has a max_age, and drops wake-ups that have waited for longer.",
            "Remove max_age from the AgeLimit in DRAMATIQ_BROKER['MIDDLEWARE'], and set it on the "
            "actors that want it.",
        )
