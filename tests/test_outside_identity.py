"""`idempotency_key=` and `message_id=`: what the outside world sends twice is one message."""

from datetime import timedelta
from types import ModuleType
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    handles,
    publish,
    send,
    started_by,
    when,
)
from django_workflows.errors import MessageError
from django_workflows.models import Delivery
from tests.concurrency import at_once
from tests.delivering import delivery_of
from tests.models import Note, ParcelState

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("isolated_registry"),
]


class PaymentReported(Event):
    text: str = "paid"


class PaymentRefused(Event):
    text: str = "refused"


class Book(Command):
    text: str = "booked"


@pytest.fixture(autouse=True)
def _notes_are_written(isolated_registry: object) -> None:
    @handles(PaymentReported, name="first")
    def first(message: PaymentReported, context: HandlerContext) -> None:
        Note.objects.create(text=f"first {message.text}")

    @handles(PaymentReported, name="second")
    def second(message: PaymentReported, context: HandlerContext) -> None:
        Note.objects.create(text=f"second {message.text}")

    @handles(PaymentRefused, name="refused")
    def refused(message: PaymentRefused, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)

    @handles(Book, name="book")
    def book(message: Book, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


def notes() -> list[str]:
    return sorted(Note.objects.values_list("text", flat=True))


def test_a_webhook_that_comes_twice_is_one_message(workflows: ModuleType) -> None:
    """B13 at the edge: also when the first has been handled by then; each handler has it once."""
    ids = publish(PaymentReported(), idempotency_key="evt_1")
    workflows.run_until_idle()

    ids += publish(PaymentReported(text="again"), idempotency_key="evt_1")
    workflows.run_until_idle()

    assert notes() == ["first paid", "second paid"]
    assert ids[0] == ids[1]
    assert set(Delivery.objects.values_list("message_id", flat=True)) == set(ids)


def test_a_webhook_that_comes_twice_at_the_same_moment_is_one_message(
    workflows: ModuleType,
) -> None:
    """B13 at the edge, raced; each in the transaction of a request."""
    rounds = 20 if connection.vendor == "postgresql" else 5

    def request(number: int) -> list[UUID]:
        with transaction.atomic():
            return publish(PaymentReported(text=str(number)), idempotency_key=f"evt_{number}")

    ids = [at_once(*[lambda n=number: request(n)] * 4) for number in range(rounds)]
    workflows.run_until_idle()

    assert all(len({tuple(given) for given in four}) == 1 for four in ids)
    assert notes() == sorted(
        f"{handler} {number}" for handler in ("first", "second") for number in range(rounds)
    )


def test_a_webhook_whose_first_request_rolled_back_is_taken_at_the_second(
    workflows: ModuleType,
) -> None:
    """B17: the key belongs to the transaction."""
    with transaction.atomic():
        publish(PaymentReported(text="lost"), idempotency_key="evt_1")
        transaction.set_rollback(True)

    publish(PaymentReported(text="kept"), idempotency_key="evt_1")
    workflows.run_until_idle()

    assert notes() == ["first kept", "second kept"]


def test_two_keys_are_two_messages(workflows: ModuleType) -> None:
    publish(PaymentRefused(), idempotency_key="evt_1")
    publish(PaymentRefused(), idempotency_key="evt_2")
    workflows.run_until_idle()

    assert notes() == ["refused", "refused"]


def test_one_key_for_messages_of_two_kinds_is_two_messages(workflows: ModuleType) -> None:
    """A workflow that takes both would otherwise get the first alone."""

    class Parcels(Workflow[ParcelState]):
        @started_by(PaymentReported)
        def report(self, message: PaymentReported) -> None:
            self.state.customer = "Ann"

        @when(PaymentRefused, lookup=lambda message: "Ann", maps_to="customer")
        def refuse(self, message: PaymentRefused) -> None:
            self.state.seen.append("refused")

    publish(PaymentReported(), idempotency_key="evt_1")
    publish(PaymentRefused(), idempotency_key="evt_1")
    workflows.run_until_idle()

    assert ParcelState.objects.get().seen == ["refused"]


def test_a_message_may_be_given_its_id(workflows: ModuleType) -> None:
    given = uuid4()

    ids = send(Book(), message_id=given)
    send(Book(text="again"), message_id=given)
    workflows.run_until_idle()

    assert ids == [given]
    assert notes() == ["booked"]
    assert (delivery_of(Book).message_id, delivery_of(Book).correlation_id) == (given, given)


def test_a_step_that_names_its_message_sends_it_once_per_name(workflows: ModuleType) -> None:
    """Also across instances: the key is the outside world's."""

    class Parcels(Workflow[ParcelState]):
        @started_by(PaymentReported)
        def report(self, message: PaymentReported) -> None:
            self.send(Book(), idempotency_key=f"booking of {message.text}")

    publish(PaymentReported(), PaymentReported(), PaymentReported(text="other"))
    workflows.run_until_idle()

    assert ParcelState.objects.count() == 3
    assert [note for note in notes() if note == "booked"] == ["booked"] * 2


def test_a_delayed_message_that_is_named_is_not_sent_again_either(workflows: ModuleType) -> None:
    """The first terms stay."""
    send(Book(text="later"), idempotency_key="k", delay=timedelta(hours=1))
    send(Book(text="now"), idempotency_key="k")
    workflows.run_until_idle()
    early = notes()

    workflows.advance(timedelta(hours=2))

    assert (early, notes()) == ([], ["later"])


@pytest.mark.parametrize("name", [{"idempotency_key": "k"}, {"message_id": uuid4()}])
def test_a_name_for_several_messages_is_an_error_for_the_sender(name: dict[str, object]) -> None:
    with pytest.raises(MessageError, match="Send them one by one"):
        publish(PaymentRefused(), PaymentRefused(), **name)  # type: ignore[arg-type]

    assert not Delivery.objects.exists()


def test_an_empty_key_is_an_error_for_the_sender() -> None:
    """The header of a webhook that is missing: all of them would be one message."""
    with pytest.raises(MessageError, match="idempotency_key=''"):
        publish(PaymentRefused(), idempotency_key="")

    assert not Delivery.objects.exists()


def test_a_key_and_an_id_together_are_an_error_for_the_sender() -> None:
    with pytest.raises(MessageError, match="Both message_id= and idempotency_key="):
        publish(PaymentRefused(), idempotency_key="k", message_id=uuid4())

    assert not Delivery.objects.exists()
