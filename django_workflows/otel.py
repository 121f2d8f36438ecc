"""Tracing with OpenTelemetry: a span for each message sent, and for each handling of a delivery.

In use where `opentelemetry-api` is installed; where spans go is for the project's SDK to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from django_workflows import __version__, masking, observing, recovery
from django_workflows.endings import Conflicted, Ending, Failed, Handled, Later, Unknown
from django_workflows.models import Delivery
from django_workflows.observing import Observer, Watch
from django_workflows.statements import NewDelivery

#: Milliseconds that a worker waits, at its end, for its last spans to leave.
FLUSH_MS = 5_000


class Tracing(Observer):
    """Spans as the semantic conventions for messaging describe them."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("django_workflows", __version__, provider)

    def sent(self, deliveries: Sequence[NewDelivery]) -> None:
        """A PRODUCER span, below the caller's; the deliveries carry it to their handlers."""
        first = deliveries[0]
        # An event that several react to goes to none of them in particular.
        to = first.handler if len(deliveries) == 1 else first.message_name
        span = self._tracer.start_span(
            f"send {first.message_name}",
            context=_parent_of(first),
            kind=SpanKind.PRODUCER,
            attributes={**_attributes("send", first), "messaging.destination.name": to},
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        span.end()
        for delivery in deliveries:
            delivery.trace_context = json.dumps(carrier) if carrier else ""

    def started(self, delivery: Delivery) -> Watch:
        """A CONSUMER span, below the sender's: one for each attempt."""
        facts: dict[str, Any] = {
            "django_workflows.attempt": delivery.attempts + 1,
            "django_workflows.delivery_id": str(delivery.id),
            "django_workflows.workflow": observing.workflow_of(delivery),
        }
        sender = _context_in(delivery)
        span = self._tracer.start_span(
            f"process {delivery.message_name}",
            context=sender,
            kind=SpanKind.CONSUMER,
            attributes={**_attributes("process", delivery), **facts},
        )
        return _Span(span, sender, delivery)

    def stopping(self) -> None:
        """Let go of the last spans: before Python 3.13 the SDK does not, in a child process."""
        flush = getattr(trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            flush(FLUSH_MS)


class _Span(Watch):
    """The span of one attempt, current on this thread until it ends."""

    def __init__(self, span: Span, sender: Context, delivery: Delivery) -> None:
        self._span = span
        self._delivery = delivery
        self._conflicts = 0
        self._token = context.attach(trace.set_span_in_context(span, sender))

    def conflicted(self, error: BaseException) -> None:
        self._conflicts += 1
        if self._span.is_recording():
            self._span.add_event("conflict", _facts_of(self._delivery, error))

    def ended(self, ending: Ending | BaseException) -> None:
        context.detach(self._token)
        if self._span.is_recording():
            self._describe(ending)
        self._span.end()

    def _describe(self, ending: Ending | BaseException) -> None:
        span, delivery = self._span, self._delivery
        span.set_attribute("django_workflows.ending", observing.name_of(delivery, ending))
        span.set_attribute("django_workflows.conflicts", self._conflicts)
        instance_id = delivery.instance_id
        match ending:
            case Failed(error) | (BaseException() as error):
                facts = _facts_of(delivery, error)
                span.add_event("exception", facts)
                span.set_attribute("error.type", facts["exception.type"])
                span.set_status(Status(StatusCode.ERROR, facts["exception.message"]))
            case Later(error) | Unknown(error) | Conflicted(error):
                span.add_event(
                    "exception", _facts_of(delivery, error)
                )  # it is put off, and no failure
            case Handled(instance) if instance is not None:
                instance_id = instance.pk
        if instance_id:
            span.set_attribute("django_workflows.instance_id", str(instance_id))


def _attributes(operation: str, delivery: Delivery | NewDelivery) -> dict[str, Any]:
    """What both spans of a message have in common."""
    return {
        "messaging.system": "django_workflows",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": delivery.handler,
        "messaging.message.id": str(delivery.message_id),
        "messaging.message.conversation_id": str(delivery.correlation_id),
        "django_workflows.message": delivery.message_name,
    }


def _parent_of(delivery: NewDelivery) -> Context | None:
    """The caller's context; without a span in it, what the message being handled came with."""
    if trace.get_current_span().get_span_context().is_valid:
        return None
    return _context_in(delivery)


def _context_in(delivery: Delivery | NewDelivery) -> Context:
    carrier = json.loads(delivery.trace_context) if delivery.trace_context else {}
    return propagate.extract(carrier)


def _facts_of(delivery: Delivery, error: BaseException) -> dict[str, str]:
    """The error as it is stored with the delivery, capped, without what is sensitive."""
    record = recovery.record_of(masking.stand_in(delivery, error), delivery.attempts)
    return {
        "exception.type": record.error_class,
        "exception.message": record.error,
        "exception.stacktrace": record.traceback,
    }


observer = Tracing()
