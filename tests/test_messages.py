"""Stored names, and the way of a message to JSON and back."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.test import override_settings
from pydantic import BaseModel, ValidationError

from django_workflows import Command, Event
from django_workflows.errors import DeclarationError, NotSerialisable, TooLarge, UnreadableBody
from django_workflows.messages import from_json, to_json
from tests.models import Note, TallyState


class Placed(Event):
    number: int = 0


class Loose(Event):
    value: Any


class Address(BaseModel):
    street: str
    lines: list[str] = []


class Parcel(Command):
    id: UUID = UUID(int=7)
    weight: Decimal = Decimal("1.50")
    ratio: float = 0.1
    text: str = ""
    day: date = date(2026, 2, 28)
    at: datetime = datetime(2026, 2, 28, 12, tzinfo=UTC)
    wait: timedelta = timedelta(days=1, microseconds=1)
    tags: frozenset[str] = frozenset({"a", "b"})
    pair: tuple[int, str] = (1, "a")
    raw: bytes = b"bytes"
    to: Address = Address(street="Main Street", lines=["4th floor"])
    note: str | None = None


# Names


def test_the_stored_name_is_the_apps_label_and_the_class_name() -> None:
    assert Placed.stored_name() == "tests.Placed"


def test_a_given_name_is_stored_instead() -> None:
    class Renamed(Event, name="orders.OrderPlaced"):
        pass

    assert Renamed.stored_name() == "orders.OrderPlaced"


def test_aliases_are_read_and_never_written() -> None:
    class Renamed(Event, name="orders.Placed", aliases=["orders.OrderPlaced", "orders.Order"]):
        pass

    assert Renamed.stored_name() == "orders.Placed"
    assert Renamed.stored_names() == ("orders.Placed", "orders.OrderPlaced", "orders.Order")


def test_a_subclass_has_a_name_of_its_own_and_no_aliases() -> None:
    class Base(Event, name="orders.Base", aliases=["orders.Former"]):
        pass

    Base.stored_name()

    class Special(Base):
        pass

    assert Special.stored_names() == ("tests.Special",)
    assert Base.stored_names() == ("orders.Base", "orders.Former")


def test_a_message_outside_every_app_must_be_given_a_name() -> None:
    class Stray(Event):
        __module__ = "somewhere.else"

    with pytest.raises(DeclarationError) as raised:
        Stray.stored_name()

    assert "somewhere.else." in str(raised.value)
    assert "outside every installed app" in str(raised.value)
    assert "name='some.Stray'" in str(raised.value)


def test_a_message_outside_every_app_with_a_name_is_right() -> None:
    class Stray(Event, name="some.Stray"):
        __module__ = "somewhere.else"

    assert Stray.stored_name() == "some.Stray"


def test_aliases_that_are_one_text_are_an_error_when_the_class_is_made() -> None:
    with pytest.raises(DeclarationError, match=r"Write aliases=\['orders.Former'\]"):

        class Renamed(Event, aliases="orders.Former"):
            pass


@pytest.mark.parametrize("name", ["copy", "stored_name", "json"])
@pytest.mark.filterwarnings("ignore:Field name")  # pydantic warns, and we raise
def test_a_field_that_hides_a_name_of_the_base_is_an_error_when_the_class_is_made(
    name: str,
) -> None:
    with pytest.raises(DeclarationError, match="Give the field another name") as raised:
        type("Hiding", (Event,), {"__annotations__": {name: str}, "__module__": __name__})

    assert name in str(raised.value)


class Unknown:
    pass


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (TallyState, "The field 'tally' of Carrying is a TallyState, a model of Django, which"),
        (TallyState | None, "Send its primary key: tally_id."),
        (list[TallyState], "a model of Django"),
        (Unknown, "Carrying has a field that no message can carry"),
    ],
)
def test_a_field_that_json_cannot_carry_is_an_error_when_the_class_is_made(
    kind: Any, sentence: str
) -> None:
    with pytest.raises(DeclarationError) as raised:
        type("Carrying", (Event,), {"__annotations__": {"tally": kind}, "__module__": __name__})

    assert sentence in str(raised.value)


# Values


def test_a_message_is_frozen() -> None:
    message = Placed(number=1)

    with pytest.raises(ValidationError, match="frozen"):
        message.number = 2

    assert message.number == 1


def test_a_misspelt_field_is_an_error_when_constructing() -> None:
    with pytest.raises(ValidationError, match="numbre"):
        Placed(numbre=1)  # type: ignore[call-arg]


def test_a_field_that_the_reader_does_not_know_is_ignored() -> None:
    message = from_json(Placed, '{"number": 3, "added_later": true}')

    assert message == Placed(number=3)


def test_a_field_that_a_nested_model_does_not_know_is_ignored() -> None:
    message = from_json(Parcel, '{"to": {"street": "Main Street", "country": "DE"}}')

    assert message == Parcel(to=Address(street="Main Street"))


def test_what_leaves_is_what_arrives() -> None:
    message = Parcel()

    assert from_json(Parcel, to_json(message)) == message


@pytest.mark.parametrize(
    "text", ["", "\x00", "a\x00b", "\u2028", "\U0001f600", '"\\', "\x7f\x1b[31m", "\ufeff\u202e"]
)
def test_any_text_arrives_as_it_left(text: str) -> None:
    message = Parcel(text=text)

    assert from_json(Parcel, to_json(message)) == message


@pytest.mark.parametrize("value", [None, True, 0, 2**70, 0.1, "a", [1, [2]], {"a": {"b": None}}])
def test_an_untyped_field_takes_what_json_knows(value: Any) -> None:
    arrived = from_json(Loose, to_json(Loose(value=value)))

    assert (arrived.value, type(arrived.value)) == (value, type(value))  # type: ignore[attr-defined]


def test_a_moment_in_an_ambiguous_hour_is_written() -> None:
    at = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)

    arrived = from_json(Parcel, to_json(Parcel(at=at)))

    assert arrived.at.timestamp() == at.timestamp()  # type: ignore[attr-defined]


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Note(text="a model"), "<Note: a model>"),
        (object(), "<object object at"),
        ({1, 2}, "{1, 2}"),
        ({"deep": {1}}, "{'deep': {1}}"),
        ((1, 2), "(1, 2)"),
        ({1: "a"}, "{1: 'a'}"),
        (b"bytes", "b'bytes'"),
        (b"\xff", r"b'\xff'"),
        (Decimal("1.50"), "Decimal('1.50')"),
        (date(2026, 1, 1), "datetime.date(2026, 1, 1)"),
        (timedelta(1), "datetime.timedelta(days=1)"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("\ud800", r"'\ud800'"),
        (BytesIO(b"a file"), "BytesIO"),
        (iter([1]), "list_iterator"),
        (len, "<built-in function len>"),
        (Note, "Note"),
        (cycle(), "[[...]]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_untyped_field_cannot_keep_is_an_error_that_names_it(
    value: Any, shown: str
) -> None:
    with pytest.raises(NotSerialisable) as raised:
        to_json(Loose(value=value))

    assert str(raised.value).startswith("Loose.value is ")
    assert shown in str(raised.value)
    assert "Send ids, numbers, text" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("text", "\ud800", r"'\ud800'"),
        ("ratio", float("nan"), "ratio=nan"),
        ("ratio", float("-inf"), "ratio=-inf"),
        ("raw", b"\xff", r"b'\xff'"),
    ],
)
def test_a_value_of_the_right_type_that_json_cannot_keep_is_an_error_that_names_it(
    field: str, value: Any, shown: str
) -> None:
    with pytest.raises(NotSerialisable) as raised:
        to_json(Parcel(**{field: value}))

    assert field in str(raised.value)
    assert shown in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_value_without_a_repr_is_an_error_all_the_same() -> None:
    with pytest.raises(NotSerialisable, match="would not arrive"):
        to_json(Loose(value=10**5000))


def test_a_file_is_an_error(tmp_path: Any) -> None:
    (tmp_path / "upload").write_text("content")

    with (tmp_path / "upload").open() as file, pytest.raises(NotSerialisable, match="upload"):
        to_json(Loose(value=file))


# Size


def test_a_body_over_the_limit_is_an_error_that_names_both_sizes() -> None:
    message = Loose(value="a" * 2000)

    with (
        override_settings(DJANGO_WORKFLOWS={"MAX_BODY_BYTES": 1000}),
        pytest.raises(TooLarge) as raised,
    ):
        to_json(message)

    assert "Loose is 2,012 bytes as JSON and MAX_BODY_BYTES is 1,000" in str(raised.value)
    assert "Store the data in a model and send its id" in str(raised.value)


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u20ac", "\U0001f600"])
def test_the_limit_counts_bytes_and_is_allowed_itself(character: str) -> None:
    message = Loose(value=character * 100)
    size = len('{"value":""}') + 100 * len(character.encode())

    with override_settings(DJANGO_WORKFLOWS={"MAX_BODY_BYTES": size}):
        body = to_json(message)
    with override_settings(DJANGO_WORKFLOWS={"MAX_BODY_BYTES": size - 1}), pytest.raises(TooLarge):
        to_json(message)

    assert len(body.encode()) == size


# Bodies that are no such message


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "the body"),
        ("null", "the body"),
        ("nonsense", "the body"),
        ("\x00", "the body"),
        ("[" * 100_000, "the body: Invalid JSON: recursion limit exceeded"),
        ('{"text": "\\ud800"}', "the body: Invalid JSON"),
        ('{"weight": "heavy", "ratio": "x"}', "ratio: Input should be a valid number"),
        ('{"to": {"street": 5}}', "to.street: Input should be a valid string"),
        ('{"day": "2026-02-30"}', "day: "),
    ],
)
def test_an_unreadable_body_is_an_error_that_names_the_field(body: str, problem: str) -> None:
    with pytest.raises(UnreadableBody) as raised:
        from_json(Parcel, body)

    assert str(raised.value).startswith("The stored body is not a valid Parcel (")
    assert problem in str(raised.value)
    assert "then replay the delivery" in str(raised.value)
    assert "\n" not in str(raised.value)
