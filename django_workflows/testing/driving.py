"""The engine on the real tables, in the test's own thread and transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

from django_workflows import clock, dispatch, outbox
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Status

M = TypeVar("M", bound=Message)


def run_until_idle(*, limit: int = 1000) -> int:
    """Handle what is due, and what that leads to, until nothing is; how many deliveries that were.

    In this thread and in the test's own transaction, oldest due first. What fails waits for its
    backoff: see `failed`, and `advance`. Raises `AssertionError` after `limit` deliveries, since
    messages that send each other would never end.
    """
    return _handle_due(0, limit)


def advance(by: timedelta, *, limit: int = 1000) -> int:
    """Move the engine's clock on step by step to what falls due, handling it; how many that were.

    Inside `moved_clock` (the pytest fixture `workflows`) the clock is put back at the end. The
    rest is as for `run_until_idle`.
    """
    count = run_until_idle(limit=limit)  # first, so that what it sends for later counts from now
    until = clock.read(outbox.database()) + by
    while (following := _pending().order_by("due_at").first()) and following.due_at <= until:
        clock.offset += max(following.due_at - clock.read(outbox.database()), timedelta(0))
        clock.offset += timedelta(microseconds=1)
        count = _handle_due(count, limit)
    clock.offset += max(until - clock.read(outbox.database()), timedelta(0))
    return _handle_due(count, limit)


def sent(message_class: type[M]) -> list[M]:
    """The messages of this class that were sent or published, oldest first, each once.

    Those that were cancelled since are among them, noted undo commands only once they are sent.
    """
    unsent = {"undoes": True, "status__in": (Status.NOTED, Status.CANCELLED), "claims": 0}
    rows = (
        Delivery.objects.filter(message_name__in=message_class.stored_names())
        .exclude(**unsent)
        .order_by("pk")
        .values_list("message_id", "body")
    )
    return [cast("M", from_json(message_class, body)) for body in dict(rows).values()]


def failed() -> list[Delivery]:
    """The deliveries whose last attempt has failed, whether they will be retried or not."""
    return list(Delivery.objects.exclude(error="").exclude(status=Status.HANDLED).order_by("pk"))


@contextmanager
def moved_clock() -> Iterator[None]:
    """Put the engine's clock back at the end of the block, and hand nothing to a broker in it."""
    transport, outbox.transport = outbox.transport, outbox.NoTransport()
    offset = clock.offset
    try:
        yield
    finally:
        clock.offset = offset
        outbox.transport = transport


def _handle_due(count: int, limit: int) -> int:
    """Handle what is due; `count` and how many deliveries that were."""
    while due := _next_due():
        if count == limit:
            raise AssertionError(
                f"{limit} deliveries were handled and there is more, next {due}. Do messages send "
                f"each other for ever? Otherwise raise limit=."
            )
        dispatch.deliver(due.pk)
        count += 1
    return count


def _pending() -> Any:
    return Delivery.objects.filter(status=Status.PENDING)


def _next_due() -> Delivery | None:
    found = _pending().filter(due_at__lte=clock.read(outbox.database())).order_by("due_at", "pk")
    return cast("Delivery | None", found.first())
