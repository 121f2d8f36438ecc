"""Traces: one for a whole process, with a span for each message sent and each attempt at one."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import pytest
from django.test import override_settings
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    RetryLater,
    Sensitive,
    define_workflow,
    handles,
    observing,
    publish,
    relay,
    send,
)
from django_workflows.dispatch import claim, deliver
from django_workflows.errors import StaleState
from django_workflows.models import Delivery, Status
from django_workflows.observing import Observer
from django_workflows.otel import Tracing
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import ParcelState, TallyState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class ParcelPosted(Event):
    number: int = 1


class WeighParcel(Command):
    pass


class ParcelWeighed(Event):
    pass


class UnweighParcel(Command):
    pass


class SlotTaken(Event):
    key: str


class TakePayment(Command):
    card: Annotated[str, Sensitive()]


class Spans:
    """What was traced, in the order of its end."""

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.tracer = provider.get_tracer("tests")
        self._exporter = exporter

    @property
    def finished(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name.replace("tests.", "") for span in self.finished]

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.finished if span.name.replace("tests.", "") == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.all(name)
        return span

    def path_to(self, span: ReadableSpan) -> list[str]:
        """The names of the spans from the root to this one."""
        by_id = {s.context.span_id: s for s in self.finished if s.context}
        path = [span]
        while path[0].parent and path[0].parent.span_id in by_id:
            path.insert(0, by_id[path[0].parent.span_id])
        return [s.name.replace("tests.", "") for s in path]


def traced_with(provider: TracerProvider) -> tuple[Observer, ...]:
    return (Tracing(provider),)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observing, "observers", traced_with(provider))
    yield Spans(provider, exporter)
    provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def event(span: ReadableSpan, name: str) -> dict[str, Any]:
    (found,) = [event for event in span.events if event.name == name]
    return dict(found.attributes or {})


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def declare_weighing() -> None:
    """ParcelPosted starts an instance, which asks for the weight and is told."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        context.send(WeighParcel())

    @workflow.when(ParcelWeighed)
    def weighed(message: ParcelWeighed, state: ParcelState, context: Any) -> None:
        context.complete()

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        context.reply(ParcelWeighed())


def test_one_trace_leads_from_the_request_to_the_reply(spans: Spans) -> None:
    declare_weighing()

    with spans.tracer.start_as_current_span("POST /parcels"):
        publish(ParcelPosted())
    deliver_due()

    assert spans.path_to(spans.one("process ParcelWeighed")) == [
        "POST /parcels",
        "send ParcelPosted",
        "process ParcelPosted",
        "send WeighParcel",
        "process WeighParcel",
        "send ParcelWeighed",
        "process ParcelWeighed",
    ]


def test_the_senders_span_follows_the_conventions_for_messaging(spans: Spans) -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None: ...

    send(WeighParcel())

    sent, delivery = spans.one("send WeighParcel"), delivery_of(WeighParcel)
    assert sent.kind == SpanKind.PRODUCER
    assert attributes(sent) == {
        "messaging.system": "django_workflows",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "tests.weigh",
        "messaging.message.id": str(delivery.message_id),
        "messaging.message.conversation_id": str(delivery.correlation_id),
        "django_workflows.message": "tests.WeighParcel",
    }


def test_the_handlers_span_follows_the_conventions_for_messaging(spans: Spans) -> None:
    declare_weighing()

    publish(ParcelPosted())
    deliver_due()

    processed, delivery = spans.one("process ParcelPosted"), delivery_of(ParcelPosted)
    assert processed.kind == SpanKind.CONSUMER
    assert attributes(processed) == {
        "messaging.system": "django_workflows",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "tests.ParcelState",
        "messaging.message.id": str(delivery.message_id),
        "messaging.message.conversation_id": str(delivery.correlation_id),
        "django_workflows.message": "tests.ParcelPosted",
        "django_workflows.delivery_id": str(delivery.id),
        "django_workflows.attempt": 1,
        "django_workflows.workflow": "tests.ParcelState",
        "django_workflows.instance_id": str(ParcelState.objects.get().pk),
        "django_workflows.ending": "handled",
        "django_workflows.conflicts": 0,
    }


def test_an_event_to_several_is_sent_once_and_processed_by_each(spans: Spans) -> None:
    handles(ParcelPosted, name="t.first")(lambda message, context: None)
    handles(ParcelPosted, name="t.second")(lambda message, context: None)

    publish(ParcelPosted())
    deliver_due()

    sent, processed = spans.one("send ParcelPosted"), spans.all("process ParcelPosted")
    assert attributes(sent)["messaging.destination.name"] == "tests.ParcelPosted"
    assert {attributes(span)["messaging.destination.name"] for span in processed} == {
        "t.first",
        "t.second",
    }
    assert {parent_id(span) for span in processed} == {span_id(sent)}


def test_the_sender_inside_an_own_span_is_below_it(spans: Spans) -> None:
    handles(WeighParcel)(lambda message, context: None)

    @handles(ParcelPosted)
    def post(message: ParcelPosted, context: Any) -> None:
        with spans.tracer.start_as_current_span("look up the scales"):
            context.send(WeighParcel())

    publish(ParcelPosted())
    deliver_due()

    assert spans.path_to(spans.one("send WeighParcel"))[-3:] == [
        "process ParcelPosted",
        "look up the scales",
        "send WeighParcel",
    ]


def test_after_a_delivery_its_span_is_not_the_current_one(spans: Spans) -> None:
    inside = []

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        inside.append(trace.get_current_span())
        raise ValueError("no scales")

    send(WeighParcel())

    deliver_due()

    assert inside[0].get_span_context().span_id == span_id(spans.one("process WeighParcel"))
    assert not trace.get_current_span().get_span_context().is_valid


@override_settings(DJANGO_WORKFLOWS={"BACKOFF": timedelta(0)})
def test_each_retry_is_a_span_of_its_own_below_the_same_sender(spans: Spans) -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        if context.attempt < 3:
            raise ValueError("no scales")

    send(WeighParcel())

    deliver_due()

    tries = spans.all("process WeighParcel")
    assert [attributes(span)["django_workflows.attempt"] for span in tries] == [1, 2, 3]
    assert [attributes(span)["django_workflows.ending"] for span in tries] == [
        "retried",
        "retried",
        "handled",
    ]
    assert [span.status.status_code for span in tries] == [
        StatusCode.ERROR,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    assert {parent_id(span) for span in tries} == {span_id(spans.one("send WeighParcel"))}


def test_a_failed_attempt_has_its_error_on_the_span(spans: Spans) -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        context.fail("no scales")

    send(WeighParcel())

    deliver_due()

    span = spans.one("process WeighParcel")
    assert attributes(span)["django_workflows.ending"] == "failed"
    assert attributes(span)["error.type"] == "django_workflows.errors.Unrecoverable"
    assert span.status.status_code == StatusCode.ERROR
    assert "no scales" in str(span.status.description)
    assert "no scales" in event(span, "exception")["exception.message"]
    assert "in weigh" in event(span, "exception")["exception.stacktrace"]


def test_what_is_sensitive_is_masked_in_the_error_on_the_span(spans: Spans) -> None:
    @handles(TakePayment)
    def take_payment(message: TakePayment, context: Any) -> None:
        context.fail(f"{message.card} was refused")

    send(TakePayment(card="4111-1111-1111-1111"))

    deliver_due()

    span = spans.one("process TakePayment")
    assert "was refused" in event(span, "exception")["exception.message"]
    assert "4111" not in span.to_json()


def test_a_handler_that_asks_for_later_has_not_failed(spans: Spans) -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        raise RetryLater(timedelta(hours=1))

    send(WeighParcel())

    deliver_due()

    span = spans.one("process WeighParcel")
    assert attributes(span)["django_workflows.ending"] == "later"
    assert event(span, "exception")["exception.type"].endswith("RetryLater")
    assert span.status.status_code == StatusCode.UNSET


def test_conflicts_are_events_on_the_one_span(spans: Spans) -> None:
    runs = []

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        runs.append(context.attempt)
        if len(runs) < 3:
            raise StaleState("another was faster")

    send(WeighParcel())

    deliver_due()

    span = spans.one("process WeighParcel")
    assert attributes(span)["django_workflows.conflicts"] == 2
    assert [event.name for event in span.events] == ["conflict", "conflict"]
    assert span.status.status_code == StatusCode.UNSET


def test_a_second_start_of_one_instance_is_a_conflict_and_ignored(spans: Spans) -> None:
    workflow = define_workflow(TallyState)
    workflow.started_by(SlotTaken, once_per="key")(lambda message, state, context: None)
    publish(SlotTaken(key="a"))
    deliver_due()

    publish(SlotTaken(key="a"))
    deliver_due()

    first, second = spans.all("process SlotTaken")
    assert attributes(first)["django_workflows.conflicts"] == 0
    assert attributes(second)["django_workflows.conflicts"] == 1
    assert attributes(second)["django_workflows.ending"] == "ignored"


def test_an_ignored_message_says_so(spans: Spans) -> None:
    declare_weighing()

    publish(ParcelWeighed())
    deliver_due()

    span = spans.one("process ParcelWeighed")
    assert attributes(span)["django_workflows.ending"] == "ignored"


def test_a_worker_without_tracing_passes_on_what_it_was_given(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_weighing()
    publish(ParcelPosted())
    with monkeypatch.context() as untraced:
        untraced.setattr(observing, "observers", ())
        deliver(delivery_of(ParcelPosted).id)

    deliver_due()

    assert spans.path_to(spans.one("process WeighParcel")) == [
        "send ParcelPosted",
        "process WeighParcel",
    ]


def test_the_notice_that_a_command_lost_its_workers_stays_in_the_trace(spans: Spans) -> None:
    declare_weighing_with_care()
    publish(ParcelPosted())
    deliver(delivery_of(ParcelPosted).id)
    claim(delivery_of(WeighParcel).id)
    lost = {"LOSSES": 1, "LEASE": timedelta(seconds=-1)}
    with override_settings(DJANGO_WORKFLOWS=lost):
        Delivery.objects.filter(status=Status.RUNNING).update(relay_at="2000-01-01T00:00Z")
        relay.take("default", 10)

    deliver_due()

    noticed = spans.one("process django_workflows.CommandFailed")
    assert spans.path_to(noticed) == [
        "send ParcelPosted",
        "process ParcelPosted",
        "send WeighParcel",
        "send django_workflows.CommandFailed",
        "process django_workflows.CommandFailed",
    ]


def declare_weighing_with_care() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        context.send(WeighParcel())

    @workflow.on_failure(WeighParcel)
    def unweighed(
        message: WeighParcel, failure: CommandFailed, state: ParcelState, context: Any
    ) -> None: ...

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None: ...


def test_an_undo_command_is_in_the_trace_and_has_no_sender_when_it_is_noted(spans: Spans) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        context.compensate_with(UnweighParcel())
        context.send(WeighParcel())

    @workflow.when(ParcelWeighed)
    def weighed(message: ParcelWeighed, state: ParcelState, context: Any) -> None:
        context.compensate()

    handles(WeighParcel)(lambda message, context: context.reply(ParcelWeighed()))
    handles(UnweighParcel)(lambda message, context: None)
    publish(ParcelPosted())

    deliver_due()

    assert not spans.all("send UnweighParcel")
    assert spans.path_to(spans.one("process UnweighParcel")) == [
        "send ParcelPosted",
        "process UnweighParcel",
    ]


def test_copies_for_several_instances_are_below_the_one_sender(spans: Spans) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(WeighParcel)
    def begin(message: WeighParcel, state: ParcelState, context: Any) -> None:
        state.number = 7

    workflow.when(ParcelPosted, lookup="number")(lambda message, state, context: None)
    send(WeighParcel(), WeighParcel())
    deliver_due()

    publish(ParcelPosted(number=7))
    deliver_due()

    processed = spans.all("process ParcelPosted")
    assert len(processed) == 3  # the message, and the copy for each instance
    assert {parent_id(span) for span in processed} == {span_id(spans.one("send ParcelPosted"))}


def test_what_is_not_sampled_is_not_sampled_downstream_either(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles(WeighParcel)(lambda message, context: None)
    with monkeypatch.context() as unsampled:
        unsampled.setattr(observing, "observers", traced_with(TracerProvider(sampler=ALWAYS_OFF)))
        send(WeighParcel())

    deliver_due()

    carried = json.loads(delivery_of(WeighParcel).trace_context)["traceparent"]
    assert not int(carried.rpartition("-")[2], 16) & trace.TraceFlags.SAMPLED
    assert spans.finished == []


def test_without_an_sdk_nothing_is_stored_with_a_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observing, "observers", (Tracing(),))
    handles(WeighParcel)(lambda message, context: None)

    send(WeighParcel())
    deliver_due()

    delivery = delivery_of(WeighParcel)
    assert (delivery.status, delivery.trace_context) == (Status.HANDLED, "")


def test_trace_context_is_not_among_what_handlers_see(spans: Spans) -> None:
    seen = []

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        seen.append((context.attributes, context.sticky_attributes))

    send(WeighParcel(), attributes={"by": "air"}, sticky_attributes={"tenant": 7})

    deliver_due()

    assert delivery_of(WeighParcel).trace_context
    assert seen == [({"by": "air"}, {"tenant": 7})]


def test_a_trace_context_that_cannot_be_read_does_no_harm(spans: Spans) -> None:
    handles(WeighParcel)(lambda message, context: None)
    send(WeighParcel())
    Delivery.objects.update(trace_context='{"traceparent": ')

    deliver_due()

    assert statuses_of(WeighParcel) == ["handled"]
