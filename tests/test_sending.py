"""What travels with a message, and several messages in one call."""

from typing import Any

import pytest
from django.db import transaction

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
    send,
)
from django_workflows.errors import MessageError, NoHandler, NotSerialisable, WrongVerb
from django_workflows.models import Delivery
from tests.delivering import deliver_due, delivery_of
from tests.models import ParcelState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class ParcelPosted(Event):
    number: int = 1


class PrintLabel(Command):
    number: int = 1


class LabelPrinted(Event):
    number: int = 1


class Conversation:
    """A workflow that sends PrintLabel; the handler publishes LabelPrinted, which it continues."""

    def __init__(self, **of_step: Any) -> None:
        self.contexts: dict[str, dict[str, Any]] = {}
        workflow = define_workflow(ParcelState)

        @workflow.started_by(ParcelPosted)
        def post(message: ParcelPosted, state: ParcelState, context: WorkflowContext[Any]) -> None:
            self.note("posted", context)
            context.send(PrintLabel(), **of_step)

        @handles(PrintLabel)
        def print_label(message: PrintLabel, context: HandlerContext) -> None:
            self.note("printing", context)
            context.publish(LabelPrinted())

        @workflow.when(LabelPrinted)
        def label(message: LabelPrinted, state: ParcelState, context: WorkflowContext[Any]) -> None:
            self.note("printed", context)

    def note(self, when: str, context: Any) -> None:
        names = ("attributes", "sticky_attributes", "message_id", "correlation_id", "causation_id")
        self.contexts[when] = {name: getattr(context, name) for name in names}

    def all(self, name: str) -> list[Any]:
        return [self.contexts[when][name] for when in ("posted", "printing", "printed")]


def test_attributes_reach_the_handlers_of_the_message_alone() -> None:
    """F47, plain attributes."""
    conversation = Conversation()

    publish(ParcelPosted(), attributes={"tenant": "acme", "tries": 3})
    deliver_due()

    assert conversation.all("attributes") == [{"tenant": "acme", "tries": 3}, {}, {}]
    assert conversation.all("sticky_attributes") == [{}, {}, {}]


def test_sticky_attributes_reach_everything_downstream() -> None:
    """F47, sticky attributes."""
    conversation = Conversation()

    publish(ParcelPosted(), sticky_attributes={"tenant": "acme"})
    deliver_due()

    assert conversation.all("sticky_attributes") == [{"tenant": "acme"}] * 3


def test_sticky_attributes_are_added_to_those_that_came_along() -> None:
    conversation = Conversation(sticky_attributes={"region": "eu", "tenant": "other"})

    publish(ParcelPosted(), sticky_attributes={"tenant": "acme"})
    deliver_due()

    assert conversation.all("sticky_attributes") == [
        {"tenant": "acme"},
        {"tenant": "other", "region": "eu"},
        {"tenant": "other", "region": "eu"},
    ]


@pytest.mark.parametrize("kind", ["attributes", "sticky_attributes"])
@pytest.mark.parametrize(
    "value",
    [{"a": {1, 2}}, {"a": object()}, {1: "a"}, {"a": (1,)}, {"a": float("nan")}, {"a": "\x00"}],
)
def test_attributes_that_would_arrive_changed_are_an_error_for_the_sender(
    kind: str, value: Any
) -> None:
    Conversation()

    with pytest.raises(NotSerialisable, match=r"tests\.ParcelPosted cannot be stored"):
        publish(ParcelPosted(), **{kind: value})  # type: ignore[misc]

    assert not Delivery.objects.exists()


def test_a_conversation_shares_its_correlation_id_and_each_message_names_its_cause() -> None:
    conversation = Conversation()

    [first] = publish(ParcelPosted())
    deliver_due()

    ids = conversation.all("message_id")
    assert conversation.all("correlation_id") == [first] * 3
    assert conversation.all("causation_id") == [None, ids[0], ids[1]]
    assert len(set(ids)) == 3


def test_several_messages_in_one_call_have_an_id_each_in_their_order() -> None:
    Conversation()

    ids = send(*(PrintLabel(number=number) for number in range(5)))

    stored = {d.message_id: d.body for d in Delivery.objects.all()}
    assert [stored[id] for id in ids] == [f'{{"number":{number}}}' for number in range(5)]


def test_several_messages_in_one_call_leave_in_one_statement(
    django_assert_num_queries: Any,
) -> None:
    Conversation()

    with transaction.atomic(), django_assert_num_queries(1):
        publish(*(ParcelPosted(number=number) for number in range(50)))

    assert Delivery.objects.count() == 50


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: send(PrintLabel(), ParcelPosted()), WrongVerb, r"an event .* use publish\(\)"),
        (lambda: publish(ParcelPosted(), PrintLabel()), WrongVerb, r"a command .* use send\(\)"),
        (lambda: send(PrintLabel(), "text"), MessageError, "'text' is not a message"),
    ],
)
def test_of_several_messages_one_that_is_wrong_keeps_all_from_leaving(
    call: Any, error: type[Exception], sentence: str
) -> None:
    Conversation()

    with pytest.raises(error, match=sentence):
        call()

    assert not Delivery.objects.exists()


def test_a_command_without_a_handler_is_an_error_for_its_sender() -> None:
    with pytest.raises(NoHandler, match=r"Nothing handles the command PrintLabel.*@handles"):
        send(PrintLabel())


def test_a_step_that_sends_nothing_valid_fails_and_says_so() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: WorkflowContext[Any]) -> None:
        send(PrintLabel())  # the module's own, deep inside the step

    publish(ParcelPosted())
    deliver_due()

    assert "NoHandler: Nothing handles the command PrintLabel" in delivery_of(ParcelPosted).error


def test_what_the_modules_send_sends_in_a_step_belongs_to_the_step() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: WorkflowContext[Any]) -> None:
        send(PrintLabel())

    @handles(PrintLabel)
    def print_label(message: PrintLabel, context: HandlerContext) -> None: ...

    [first] = publish(ParcelPosted())
    deliver_due()

    sent, state = delivery_of(PrintLabel), ParcelState.objects.get()
    assert (sent.sender, sent.sender_instance_id, sent.sender_step) == (
        "tests.ParcelState",
        state.pk,
        "post",
    )
    assert (sent.causation_id, sent.correlation_id) == (first, first)


@pytest.mark.parametrize(
    ("call", "verb"), [(publish, "publish"), (send, "send")], ids=["publish", "send"]
)
def test_an_option_that_does_not_exist_is_named_with_those_that_do(call: Any, verb: str) -> None:
    with pytest.raises(MessageError) as raised:
        call(in_=3)

    assert f"{verb}() has no option 'in_'. Its options are delay, at, " in str(raised.value)


@pytest.mark.parametrize(
    ("verb", "options"),
    [("reply", "delay, at, "), ("compensate_with", "attributes, sticky_attributes.")],
)
def test_a_step_is_told_of_an_option_that_does_not_exist(verb: str, options: str) -> None:
    workflow = define_workflow(ParcelState)
    handles(PrintLabel, name="print_label")(lambda message, context: None)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: WorkflowContext[Any]) -> None:
        getattr(context, verb)(PrintLabel(), in_=3)

    publish(ParcelPosted())
    deliver_due()

    error = delivery_of(ParcelPosted).error
    assert f"{verb}() has no option 'in_'. Its options are {options}" in error
