"""Who watches the engine at work: tracing and metrics, if their libraries are installed.

Without an observer, all that a delivery pays is to see that there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from django_workflows import registry
from django_workflows.declarations import WorkflowDefinition
from django_workflows.endings import Ending, Failed
from django_workflows.models import Delivery, Status
from django_workflows.statements import NewDelivery

logger = logging.getLogger(__name__)


class Watch:
    """What an observer does while one delivery is handled, on the thread that handles it."""

    def conflicted(self, error: BaseException) -> None:
        """A run of it was rolled back, as the moment was wrong; another follows in place."""

    def ended(self, ending: Ending | BaseException) -> None:
        """It is over. An exception: how it ended could not be recorded, and the relay has it."""


class Observer:
    """What watches deliveries in this process. What it raises is logged and changes nothing."""

    def sent(self, deliveries: Sequence[NewDelivery]) -> None:
        """A message is about to be sent: all its deliveries, whose `trace_context` may be set."""

    def started(self, delivery: Delivery) -> Watch:
        """This process has claimed a delivery and is about to handle it."""
        return Watch()

    def stopping(self) -> None:
        """This worker process handles nothing any more and is about to end."""


#: Set by the app when it is ready.
observers: tuple[Observer, ...] = ()


def sent(deliveries: Sequence[NewDelivery]) -> None:
    """Tell the observers that a message is sent."""
    for observer in observers:
        _safely(observer.sent, deliveries)


def stopping() -> None:
    """Tell the observers that this worker process ends."""
    for observer in observers:
        _safely(observer.stopping)


class Handling:
    """What all observers do while one delivery is handled."""

    def __init__(self, delivery: Delivery) -> None:
        watches = [_safely(observer.started, delivery) for observer in observers]
        self._watches = [watch for watch in watches if watch is not None]

    def conflicted(self, error: BaseException) -> None:
        for watch in self._watches:
            _safely(watch.conflicted, error)

    def ended(self, ending: Ending | BaseException) -> None:
        for watch in reversed(self._watches):  # as nested blocks would end
            _safely(watch.ended, ending)
        self._watches = []


@contextmanager
def handling(delivery: Delivery) -> Iterator[Handling]:
    """Let the observers watch a delivery until it has `ended`."""
    watched = Handling(delivery)
    try:
        yield watched
    except BaseException as error:
        watched.ended(error)
        raise


def _safely(tell: Callable[..., Any], *about: Any) -> Any:
    try:
        return tell(*about)
    except Exception:
        logger.exception("An observer of deliveries failed; the delivery is not affected.")


# What observers and log records say


def name_of(delivery: Delivery, ending: Ending | BaseException) -> str:
    """The word for how the handling of a delivery has ended."""
    if isinstance(ending, BaseException):
        return "unrecorded"
    if isinstance(ending, Failed) and delivery.status != Status.FAILED:
        return "retried"
    return type(ending).__name__.lower()


def workflow_of(delivery: Delivery) -> str:
    """The workflow that a delivery goes to; nothing for one to a plain handler."""
    recipient = registry.current().recipient(delivery.handler)
    return recipient.name if isinstance(recipient, WorkflowDefinition) else ""


def facts_of(delivery: Delivery, instance_id: UUID | None = None) -> dict[str, Any]:
    """What a log record says about a delivery: the names are those of `logs.FACTS`."""
    instance_id = instance_id or delivery.instance_id
    return {
        "delivery_id": str(delivery.id),
        "delivery_attempt": delivery.attempts + 1,
        "delivery_handler": delivery.handler,
        "delivery_workflow": workflow_of(delivery),
        "delivery_instance": str(instance_id) if instance_id else None,
        "delivery_message": delivery.message_name,
        "delivery_message_id": str(delivery.message_id),
        "delivery_correlation_id": str(delivery.correlation_id),
    }
