"""`replay_messages`: groups, errors, edited bodies from a file, and a rate."""

import json
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from django_workflows import Command, HandlerContext, handles
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due
from tests.models import Note
from tests.stored import stored

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("isolated_registry"),
]


class Print(Command, name="tests.replay.Print"):
    text: str


@pytest.fixture
def printer(isolated_registry: Any) -> None:
    @handles(Print, name="tests.printer")
    def print_it(message: Print, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


def to_print(body: str = "{}", **fields: Any) -> Delivery:
    return stored(handler="tests.printer", message_name=Print.stored_name(), body=body, **fields)


def run(*arguments: object) -> dict[str, Any]:
    out = StringIO()
    call_command("replay_messages", "--json", *map(str, arguments), stdout=out)
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def pending() -> set[Delivery]:
    return set(Delivery.objects.filter(status=Status.PENDING))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write({"id": ..., "body": ...}, "a line as it is")` to a file."""

    def to_file(*lines: Any) -> Path:
        file = tmp_path / "bodies.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line, default=str) for line in lines]
        file.write_text("\n".join(texts), encoding="utf-8")
        return file

    return to_file


# Groups and errors


@pytest.mark.parametrize("asked", ["shop.errors.OutOfInk", "OutOfInk"])
def test_only_what_failed_with_an_error_is_replayed(asked: str) -> None:
    wanted = stored(error_class="shop.errors.OutOfInk")
    stored(error_class="shop.errors.NotOutOfInk")
    stored(error_class="ValueError")

    result = run("--error", asked)

    assert (result["replayed"], pending()) == (1, {wanted})


def test_only_a_group_is_replayed() -> None:
    wanted = stored(handler="gone", error_class="ValueError")
    stored(handler="gone", error_class="KeyError")
    stored(handler="other", error_class="ValueError")

    result = run("--group", "gone", "ValueError")

    assert (result["replayed"], pending()) == (1, {wanted})


def test_a_group_can_be_narrowed_and_tried_first() -> None:
    stored(handler="gone", error_class="ValueError", message_name="m")

    result = run("--group", "gone", "ValueError", "--status", "ignored", "--dry-run")

    assert (result["would_replay"], pending()) == (0, set())


# Edited bodies


@pytest.mark.usefixtures("printer")
def test_deliveries_are_replayed_with_the_bodies_of_a_file(write: Callable[..., Path]) -> None:
    first, second = to_print(), to_print('{"text": "as it was"}')
    other = to_print()
    file = write(
        {"id": first.pk, "body": {"text": "one"}},
        "",
        {"id": second.pk, "body": {"text": "two \U0001f600"}},
    )

    result = run("--bodies-from", file)
    deliver_due()

    assert result["replayed"] == 2
    assert set(Note.objects.values_list("text", flat=True)) == {"one", "two \U0001f600"}
    second.refresh_from_db()
    other.refresh_from_db()
    assert second.original_body == '{"text": "as it was"}'
    assert other.status == Status.FAILED


@pytest.mark.usefixtures("printer")
@pytest.mark.parametrize("body", [{"text": 7}, {}, {"text": "x", "size": 1}, [], "text", None])
def test_one_body_that_does_not_fit_keeps_all_from_being_replayed(
    body: Any, write: Callable[..., Path]
) -> None:
    good, bad = to_print(), to_print()
    file = write({"id": good.pk, "body": {"text": "one"}}, {"id": bad.pk, "body": body})

    with pytest.raises(CommandError, match=rf"{bad.pk}: .* Nothing has been replayed"):
        run("--bodies-from", file)

    assert pending() == set()


@pytest.mark.usefixtures("printer")
def test_what_cannot_be_replayed_is_named_and_left_alone(write: Callable[..., Path]) -> None:
    handled, failed = to_print(status=Status.HANDLED), to_print()
    file = write(*({"id": row.pk, "body": {"text": "x"}} for row in (handled, failed)))

    result = run("--bodies-from", file)

    assert result["skipped"] == [{"id": str(handled.pk), "status": "handled"}]
    assert (result["replayed"], pending()) == (1, {failed})
    handled.refresh_from_db()
    assert handled.body == "{}"


@pytest.mark.usefixtures("printer")
def test_a_dry_run_checks_the_bodies_and_changes_nothing(write: Callable[..., Path]) -> None:
    row = to_print()
    file = write({"id": row.pk, "body": {"text": "x"}})

    result = run("--bodies-from", file, "--dry-run")

    row.refresh_from_db()
    assert (result["would_replay"], row.status, row.body) == (1, Status.FAILED, "{}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: write"),
        ("[]", "line 1: write"),
        ('{"id": "7", "body": {}}', "line 1: write"),
        ('{"id": 7, "body": {}}', "line 1: write"),
        (json.dumps({"id": str(uuid4())}), "line 1: write"),
        (json.dumps({"id": str(uuid4()), "body": {}}), "No delivery has the id"),
        ("", "has no bodies"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused(
    line: str, said: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(CommandError, match=said):
        run("--bodies-from", write(line))


def test_a_delivery_that_is_named_twice_is_refused(write: Callable[..., Path]) -> None:
    line = {"id": uuid4(), "body": {}}

    with pytest.raises(CommandError, match=r"line 2: .* is there twice"):
        run("--bodies-from", write(line, line))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read"):
        run("--bodies-from", tmp_path / "none")


def test_a_filter_with_a_file_of_bodies_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(CommandError, match="Give no ids and no filter"):
        run("--bodies-from", write(""), "--error", "ValueError")


# The rate


def test_a_rate_is_kept() -> None:
    for _ in range(7):
        stored()
    began = time.monotonic()

    result = run("--all", "--rate", 20)

    assert result["replayed"] == 7
    assert time.monotonic() - began >= 7 / 20


def test_what_is_replayed_at_a_rate_is_due_in_several_batches() -> None:
    for _ in range(6):
        stored()

    run("--all", "--rate", 8)

    assert Delivery.objects.values("due_at").distinct().count() == 2  # of half a second each


@pytest.mark.parametrize("rate", ["0", "-1", "inf", "nan", "fast"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(CommandError, match="is not a number above 0"):
        run("--all", f"--rate={rate}")
