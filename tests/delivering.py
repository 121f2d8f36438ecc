"""Taking and delivering what is due, on the thread of the test, as a worker would."""

from datetime import timedelta
from typing import Any

import pytest

from django_workflows import clock, dispatch, registry, relay
from django_workflows.models import Delivery


def deliver_due(rounds: int = 50) -> None:
    """Deliver whatever is due, and what that sends, until nothing is."""
    for _ in range(rounds):
        taken = [
            row for queue in sorted(registry.current().queues) for row in relay.take(queue, 100)
        ]
        if not taken:
            return
        for row in taken:
            dispatch.deliver(row.id)
    pytest.fail(f"deliveries are still due after {rounds} rounds")


def delivery_of(message: type, **filters: Any) -> Delivery:
    """The one delivery of messages of this class."""
    return Delivery.objects.get(message_name=message.stored_name(), **filters)


def statuses_of(message: type) -> list[str]:
    """Where the deliveries of messages of this class stand, oldest first."""
    found = Delivery.objects.filter(message_name=message.stored_name())
    return [str(status) for status in found.order_by("id").values_list("status", flat=True)]


def move_clock_on(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    """Let so much time pass for the engine, by its own hook for tests."""
    monkeypatch.setattr(clock, "offset", clock.offset + by)
