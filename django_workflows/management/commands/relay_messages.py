import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from django_workflows import outbox, relay, workers
from django_workflows.actors import DatabaseTransport, DramatiqTransport
from django_workflows.workers import Presence


class Command(BaseCommand):
    help = (
        "Hand due deliveries to RabbitMQ or Redis until told to stop. Every worker process does "
        "this too; run it on its own when no worker runs here, as many times as you like."
    )

    def handle(self, **options: Any) -> None:
        match outbox.transport:
            case DramatiqTransport() as transport:
                self.relay_to(type(transport.broker).__name__)
            case DatabaseTransport():
                self.stdout.write(
                    "The broker is the DatabaseBroker: workers take due deliveries from the "
                    "database themselves, so no relay is needed."
                )
            case _:
                raise CommandError(
                    "There is no broker to relay to, since 'django_dramatiq' is not in "
                    "INSTALLED_APPS. Add it, and set DRAMATIQ_BROKER."
                )

    def relay_to(self, broker: str) -> None:
        stop = threading.Event()
        # In a thread: a signal handler may set an event only if its own thread never waits for it.
        thread = threading.Thread(target=run, args=(stop,), name="django_workflows relay")
        presence = threading.Thread(target=say_so, args=(stop,), daemon=True)
        with stopped_by_signals(stop):
            thread.start()
            presence.start()
            self.stdout.write(f"Relaying due deliveries to the {broker}; Ctrl-C ends it.")
            self.stdout.flush()
            thread.join()
        self.stdout.write("The relay has ended.")


def run(stop: threading.Event) -> None:
    try:
        relay.run(stop)
    finally:
        connections.close_all()


def say_so(stop: threading.Event) -> None:
    try:
        workers.run(stop, Presence((), relays=True))
    finally:
        connections.close_all()


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set the event while the block runs."""
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
