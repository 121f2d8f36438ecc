"""Rows that this process cannot read: a body that does not parse, a name that it does not know."""

from datetime import timedelta

import pytest

from django_workflows import Command, HandlerContext, handles, send
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of, move_clock_on
from tests.models import Note

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class PrintLabel(Command):
    copies: int


class FoldLabel(Command):
    pass


class PressLabel(Command, name="tests.PressLabel", aliases=["tests.SquashLabel"]):
    pass


def declare_printing() -> None:
    @handles(PrintLabel, name="tests.print_label")
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text=f"{message.copies} copies")


def edit(message: type[Command], **values: str) -> None:
    """As a person would by hand."""
    Delivery.objects.filter(message_name=message.stored_name()).update(**values)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{", "the body"),
        ("[]", "the body"),
        ("", "the body"),
        ("{}", "copies: Field required"),
        ('{"copies": "many"}', "copies: Input should be a valid integer"),
    ],
)
def test_a_body_that_does_not_parse_fails_at_once_and_names_what_is_wrong(
    body: str, problem: str
) -> None:
    """H54."""
    declare_printing()
    send(PrintLabel(copies=1))
    edit(PrintLabel, body=body)

    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.FAILED, 1)
    assert "The stored body is not a valid PrintLabel" in delivery.error
    assert problem in delivery.error


def test_a_body_that_does_not_parse_harms_no_other_and_is_replayed_after_the_fix() -> None:
    """H54, the worker and the replay."""
    declare_printing()
    send(PrintLabel(copies=1))
    edit(PrintLabel, body="nonsense")
    send(PrintLabel(copies=2))
    deliver_due()
    before = list(Note.objects.values_list("text", flat=True))

    failed = Delivery.objects.filter(status=Status.FAILED)
    failed.update(body='{"copies": 3}')
    failed.replay()
    deliver_due()

    assert before == ["2 copies"]
    assert sorted(Note.objects.values_list("text", flat=True)) == ["2 copies", "3 copies"]
    assert not Delivery.objects.exclude(status=Status.HANDLED).exists()


def test_a_field_that_the_receiver_does_not_know_is_ignored() -> None:
    declare_printing()
    send(PrintLabel(copies=1))
    edit(PrintLabel, body='{"copies": 4, "colour": "red"}')

    deliver_due()

    assert Note.objects.get().text == "4 copies"


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("handler", "No handler or workflow is named tests.newer."),
        ("message_name", "tests.print_label handles no message named tests.newer."),
    ],
)
def test_an_unknown_name_is_tried_again_for_ten_minutes_then_failed_then_replayed(
    column: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H54: during a rolling deploy an old worker meets what only a newer one knows."""
    declare_printing()
    send(PrintLabel(copies=1))
    delivery = Delivery.objects.get()
    known = getattr(delivery, column)
    Delivery.objects.update(**{column: "tests.newer"})

    seen = []
    for _ in range(3):
        deliver_due()
        delivery.refresh_from_db()
        seen.append((delivery.status, delivery.attempts))
        assert reason in delivery.reason
        move_clock_on(monkeypatch, timedelta(minutes=5, seconds=30))
    Delivery.objects.update(**{column: known})
    Delivery.objects.all().replay()
    deliver_due()

    assert seen == [(Status.PENDING, 0), (Status.PENDING, 0), (Status.FAILED, 1)]
    assert reason in delivery.error
    delivery.refresh_from_db()
    assert delivery.status == Status.HANDLED
    assert Note.objects.count() == 1


def test_a_name_that_becomes_known_in_time_is_handled_without_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H54: the newer worker takes it."""
    declare_printing()
    send(PrintLabel(copies=1))
    edit(PrintLabel, handler="tests.newer")
    deliver_due()

    @handles(PrintLabel, name="tests.newer")
    def newer(message: PrintLabel, context: HandlerContext) -> None: ...

    move_clock_on(monkeypatch, timedelta(minutes=2))
    deliver_due()

    delivery = delivery_of(PrintLabel)
    assert (delivery.status, delivery.attempts) == (Status.HANDLED, 0)


def test_names_that_a_message_and_a_handler_had_before_are_still_read() -> None:
    """H54: aliases of both, so that a rename loses nothing in flight."""

    @handles(PressLabel, name="tests.press", aliases=["tests.squash"])
    def press(message: PressLabel, context: HandlerContext) -> None:
        Note.objects.create(text="pressed")

    send(PressLabel())
    edit(PressLabel, handler="tests.squash", message_name="tests.SquashLabel")

    deliver_due()

    assert Note.objects.get().text == "pressed"
    assert Delivery.objects.get().status == Status.HANDLED
