"""What is marked as sensitive is masked in bodies, changes, errors and log records."""

import json
import logging
from decimal import Decimal
from typing import Annotated, Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection
from django.test.utils import CaptureQueriesContext
from pydantic import BaseModel, Field
from uuid_utils.compat import uuid7

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    HandlerContext,
    Sensitive,
    define_workflow,
    handles,
    masking,
    send,
)
from django_workflows.errors import Unrecoverable
from django_workflows.messages import MASK, to_json
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import CustomerState, ParcelState
from tests.stored import stored

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

IBAN = "DE89370400440532013000"


class Card(BaseModel):
    number: Annotated[str, Sensitive()]
    month: int = 1


class Cheque(BaseModel):
    bank: str


class Charge(Command, name="tests.Charge"):
    customer: str = "Ada"
    iban: Annotated[str, Sensitive()] = IBAN
    limit: Annotated[Decimal | None, Sensitive(), Field(gt=0)] = None
    pin: Annotated[int, Sensitive()] | None = None
    card: Card | None = None
    means: list[Card | Cheque] = []  # noqa: RUF012  pydantic copies it
    by_name: dict[str, Card] = {}  # noqa: RUF012


class Post(Command, name="tests.Post"):
    number: int = 1


class Opened(Event, name="tests.Opened"):
    name: str = ""
    iban: Annotated[str, Sensitive()] = IBAN


def charging(message: Charge, context: HandlerContext) -> None:
    raise Unrecoverable(f"the bank refuses {message.iban}")


def declared() -> None:
    handles(Charge, name="tests.charge")(charging)
    handles(Post, name="tests.post")(lambda message, context: None)


def charge(**fields: Any) -> Delivery:
    message = Charge(**fields)
    return stored(message_name="tests.Charge", handler="tests.charge", body=to_json(message))


def shown_body(delivery: Delivery) -> Any:
    return json.loads(masking.masked(delivery).body)


class TestBodies:
    def test_a_marked_field_is_masked_and_the_others_are_shown(self) -> None:
        declared()

        body = shown_body(charge(limit=Decimal("10.50"), pin=1234))

        assert body["customer"] == "Ada"
        assert (body["iban"], body["limit"], body["pin"]) == (MASK, MASK, MASK)

    def test_that_a_field_has_no_value_is_shown(self) -> None:
        declared()

        body = shown_body(charge(iban="", limit=None))

        assert (body["iban"], body["limit"], body["card"]) == ("", None, None)

    def test_a_field_within_a_field_is_masked_wherever_it_stands(self) -> None:
        declared()
        card = Card(number="4111")

        body = shown_body(
            charge(card=card, means=[card, Cheque(bank="ours")], by_name={"first": card})
        )

        assert body["card"] == {"number": MASK, "month": 1}
        assert body["means"] == [{"number": MASK, "month": 1}, {"bank": "ours"}]
        assert body["by_name"] == {"first": {"number": MASK, "month": 1}}

    def test_of_an_unknown_message_only_the_keys_are_shown(self) -> None:
        delivery = stored(message_name="gone.Away", body='{"id": 5, "more": {"a": "b"}}')

        assert shown_body(delivery) == {"id": MASK, "more": MASK}

    def test_a_field_that_the_message_does_not_have_any_more_is_masked(self) -> None:
        declared()
        delivery = stored(
            message_name="tests.Post", handler="tests.post", body='{"number": 2, "was": "x"}'
        )

        assert shown_body(delivery) == {"number": 2, "was": MASK}

    def test_a_message_is_known_by_its_name_although_its_handler_is_gone(self) -> None:
        declared()
        delivery = stored(message_name="tests.Post", handler="gone.away", body='{"number": 2}')

        assert shown_body(delivery) == {"number": 2}

    def test_a_body_that_is_no_json_is_masked_as_a_whole(self) -> None:
        declared()
        delivery = stored(message_name="tests.Charge", handler="tests.charge", body=f"{{{IBAN}")

        assert shown_body(delivery) == MASK

    def test_the_body_as_it_was_before_an_edit_is_masked_too(self) -> None:
        declared()
        delivery = charge(iban="new")
        delivery.original_body = to_json(Charge())
        delivery.error = f"{IBAN} is not new"

        shown = masking.masked(delivery)

        assert json.loads(shown.original_body)["iban"] == MASK
        assert shown.error == f"{MASK} is not {MASK}"
        assert masking.text_of(delivery, IBAN) == MASK

    def test_the_row_stays_as_it_is(self) -> None:
        declared()
        delivery = charge()

        masking.masked(delivery)

        assert json.loads(delivery.body)["iban"] == IBAN

    def test_the_notice_of_a_failure_shows_nothing_of_the_command(self) -> None:
        declared()
        customers = define_workflow(CustomerState)
        customers.started_by(Opened)(lambda message, state, context: None)
        customers.on_failure(Charge)(lambda command, failure, state, context: None)
        notice = CommandFailed(
            command="tests.Charge",
            body=to_json(Charge()),
            delivery_id=uuid7(),
            handler="tests.charge",
            error=f"Refused: {IBAN}",
            attempts=1,
            losses=0,
        )
        delivery = stored(
            message_name=CommandFailed.stored_name(),
            handler="tests.CustomerState",
            body=notice.model_dump_json(),
        )

        body = shown_body(delivery)

        assert body["error"] == f"Refused: {MASK}"
        assert json.loads(body["body"])["customer"] == "Ada"
        assert json.loads(body["body"])["iban"] == MASK

    def test_the_repr_of_a_message_is_masked(self) -> None:
        message = Charge(limit=Decimal("77.5"), pin=4321)

        assert "Ada" in repr(message)
        assert not any(secret in repr(message) for secret in (IBAN, "77.5", "4321"))


class TestChanges:
    def test_before_and_after_of_a_sensitive_field_are_masked(self) -> None:
        define_workflow(CustomerState).started_by(Opened)(lambda message, state, context: None)
        changes = {"iban": ["", IBAN], "name": ["", "Ada"], "gone": [1, 2]}
        delivery = stored(
            message_name="tests.Opened", handler="tests.CustomerState", changes=changes
        )

        shown = masking.masked(delivery).changes

        assert shown == {"iban": ["", MASK], "name": ["", "Ada"], "gone": [MASK, MASK]}

    def test_values_of_an_instance(self) -> None:
        customer = CustomerState(name="Ada", iban=IBAN)

        values = masking.values_of(customer)

        assert (values["name"], values["iban"], values["id"]) == ("Ada", MASK, customer.pk)


class TestTexts:
    def texts_of(self, error: str, **fields: Any) -> str:
        declared()
        delivery = charge(**fields)
        delivery.error = error
        return masking.masked(delivery).error

    def test_a_value_of_the_body_is_masked_wherever_it_stands(self) -> None:
        text = self.texts_of(f"{IBAN}: {IBAN.lower()} of 'Ada' (x{IBAN}x)")

        assert text == f"{MASK}: {MASK} of 'Ada' (x{MASK}x)"

    def test_a_value_as_python_or_json_writes_it_is_masked(self) -> None:
        hidden = "it's \"ü\n"

        text = self.texts_of(f"{hidden!r} {json.dumps(hidden)} {hidden}", iban=hidden)

        assert "ü" not in text
        assert "it" not in text

    def test_a_short_value_is_masked_as_a_word_only(self) -> None:
        assert self.texts_of("pin 7 in line 77", pin=7) == f"pin {MASK} in line 77"

    def test_a_value_that_was_cut_is_masked(self) -> None:
        assert self.texts_of(f"cannot charge {IBAN[:9]}") == f"cannot charge {MASK}"

    def test_a_long_value_that_was_cut_within_a_text_is_masked(self) -> None:
        secret = "".join(str(uuid4()) for _ in range(9))

        assert self.texts_of(f"{secret[:200]} is refused", iban=secret) == f"{MASK} is refused"

    def test_what_pydantic_quotes_is_masked(self) -> None:
        quoted = "[type=x, input_value='DE89...000', input_type=str]"

        assert self.texts_of(quoted) == f"[type=x, input_value={MASK}, input_type=str]"

    def test_attributes_tracebacks_and_earlier_failures_are_masked_too(self) -> None:
        declared()
        delivery = charge()
        delivery.traceback = delivery.reason = f"ValueError: {IBAN}"
        delivery.failures = [{"attempt": 1, "error": f"ValueError: {IBAN}"}]
        delivery.attributes = {"account": IBAN, "tries": 3}

        shown = masking.masked(delivery)

        assert shown.traceback == shown.reason == f"ValueError: {MASK}"
        assert shown.failures == [{"attempt": 1, "error": f"ValueError: {MASK}"}]
        assert shown.attributes == {"account": MASK, "tries": 3}

    def test_without_the_body_the_class_of_the_error_is_left(self) -> None:
        declared()
        plain = stored(message_name="tests.Post", handler="tests.post")

        assert masking.in_brief(charge(), f"bank.Refused: {IBAN}") == f"bank.Refused: {MASK}"
        assert masking.in_brief(charge(), f"No {IBAN} here.") == MASK
        assert masking.in_brief(plain, "bank.Refused: 1") == "bank.Refused: 1"
        quoted = "[type=x, input_value='DE89', input_type=str]"
        assert "DE89" not in masking.in_brief(plain, quoted)

    @pytest.mark.postgres
    def test_a_value_of_the_state_that_postgres_quotes_is_masked(self) -> None:
        define_workflow(CustomerState).started_by(Opened)(lambda message, state, context: None)
        CustomerState.objects.create(iban=IBAN)
        with pytest.raises(IntegrityError) as caught:
            CustomerState.objects.create(iban=IBAN)
        delivery = stored(
            message_name="tests.Opened",
            handler="tests.CustomerState",
            body='{"name": "Ada"}',
            error=str(caught.value),
        )

        shown = masking.masked(delivery).error

        assert IBAN in delivery.error
        assert IBAN not in shown
        assert "Key (iban)=(" in shown


class TestLogs:
    def test_the_error_of_a_failed_attempt_is_logged_without_the_value(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        declared()
        send(Charge())

        deliver_due()

        delivery = delivery_of(Charge)
        assert (delivery.status, IBAN in delivery.error) == (Status.FAILED, True)
        assert IBAN not in caplog.text
        assert f"django_workflows.errors.Unrecoverable: the bank refuses {MASK}" in caplog.text
        assert "in charging" in caplog.text  # the traceback leads to the handler

    def test_masking_asks_the_database_nothing(self) -> None:
        declared()
        charge()
        claimed = Delivery.objects.only("handler", "message_name", "body", "attempts").get()

        with CaptureQueriesContext(connection) as captured:
            masking.stand_in(claimed, ValueError(IBAN))

        assert len(captured) == 0

    def test_what_an_error_came_from_is_masked_too(self, caplog: pytest.LogCaptureFixture) -> None:
        @handles(Charge, name="tests.charge")
        def charge(message: Charge, context: HandlerContext) -> None:
            try:
                raise ValueError(message.iban)
            except ValueError as error:
                error.add_note(f"It was {message.iban}.")
                raise Unrecoverable("refused") from error

        send(Charge())

        deliver_due()

        assert IBAN not in caplog.text
        assert f"ValueError: {MASK}\nIt was {MASK}." in caplog.text
        assert "Unrecoverable: refused" in caplog.text

    def test_an_error_that_says_nothing_sensitive_is_logged_as_it_is(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        raised = Unrecoverable("closed today")

        @handles(Charge, name="tests.charge")
        def charge(message: Charge, context: HandlerContext) -> None:
            raise raised

        send(Charge())

        deliver_due()

        logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
        assert logged == [raised]

    def test_the_key_of_a_missing_instance_is_logged_masked(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        parcels = define_workflow(ParcelState)
        parcels.when(Opened, lookup="iban", maps_to="customer")(lambda *_: None)
        stored(
            message_name="tests.Opened",
            handler="tests.ParcelState",
            body=to_json(Opened()),
            status=Status.PENDING,
        )

        with caplog.at_level(logging.WARNING):
            deliver_due()

        assert delivery_of(Opened).status == Status.IGNORED
        assert IBAN not in caplog.text
        assert f"customer '{MASK}'" in caplog.text
