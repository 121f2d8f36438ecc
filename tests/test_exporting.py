"""export_instance: an instance and all that happened to it, fit to be shown to others."""

import json
from datetime import timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import pytest
from django.core.management import CommandError, call_command
from uuid_utils.compat import uuid7

import django_workflows
from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Sensitive,
    WorkflowContext,
    define_workflow,
    exporting,
    handles,
    publish,
)
from django_workflows.errors import Unrecoverable
from django_workflows.messages import MASK
from django_workflows.models import Delivery, Status
from django_workflows.registry import Registry
from tests.delivering import deliver_due
from tests.models import CustomerState, SurveyState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

IBAN = "DE89370400440532013000"
CUSTOMERS = "tests.CustomerState"


class Opened(Event, name="tests.Opened"):
    name: str
    iban: Annotated[str, Sensitive()] = IBAN


class Charge(Command, name="tests.Charge"):
    iban: Annotated[str, Sensitive()]
    amount: int = 5


class Remind(Command, name="tests.Remind"):
    pass


@pytest.fixture
def customer(own_registry: Registry) -> CustomerState:
    """One that was opened, sent a command that failed, and has a reminder waiting."""
    customers = define_workflow(CustomerState)

    @customers.started_by(Opened)
    def opened(message: Opened, state: CustomerState, context: WorkflowContext) -> None:
        state.name, state.iban = message.name, message.iban
        context.send(Charge(iban=message.iban), attributes={"account": message.iban})
        context.send(Remind(), delay=timedelta(hours=1))

    @customers.when(Remind)
    def remind(message: Remind, state: CustomerState, context: WorkflowContext) -> None: ...

    @handles(Charge, name="tests.charge")
    def charge(message: Charge, context: HandlerContext) -> None:
        raise Unrecoverable(f"the bank refuses {message.iban}")

    publish(Opened(name="Ada"))
    deliver_due()
    return CustomerState.objects.get()


def run(*arguments: object) -> dict[str, Any]:
    output = StringIO()
    call_command("export_instance", *map(str, arguments), stdout=output, stderr=StringIO())
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def test_it_has_the_instance_and_its_fields(customer: CustomerState) -> None:
    exported = run(customer.pk)

    assert (exported["workflow"], exported["masked"]) == (CUSTOMERS, True)
    assert exported["django_workflows"] == django_workflows.__version__
    assert exported["instance"]["id"] == str(customer.pk)
    assert exported["instance"]["lifecycle"] == "running"
    assert exported["instance"]["fields"] == {"name": "Ada", "iban": MASK}


def test_it_has_the_deliveries_to_it_and_of_it_oldest_first(customer: CustomerState) -> None:
    stored(handler=CUSTOMERS, instance_id=uuid7())
    stored(handler="tests.OtherState", instance_id=customer.pk)

    exported = run(customer.pk)

    told = [(d["direction"], d["message_name"], d["status"]) for d in exported["deliveries"]]
    assert told == [
        ("to", "tests.Opened", "handled"),
        ("from", "tests.Charge", "failed"),
        ("itself", "tests.Remind", "pending"),
    ]
    assert exported["deliveries_in_all"] == 3
    assert exported["deliveries"][1]["body"] == {"iban": MASK, "amount": 5}
    assert exported["deliveries"][0]["changes"] == {"name": ["", "Ada"], "iban": [None, MASK]}


def test_nothing_sensitive_stands_anywhere(customer: CustomerState) -> None:
    Delivery.objects.filter(message_name="tests.Remind").update(
        reason=f"It waits for {IBAN}.", body=json.dumps({"note": IBAN})
    )

    text = json.dumps(run(customer.pk))

    assert IBAN not in text
    assert f"the bank refuses {MASK}" in text
    assert f"It waits for {MASK}." in text


def test_unmasked_it_is_as_it_is_stored(customer: CustomerState) -> None:
    exported = run(customer.pk, "--unmasked")

    assert exported["instance"]["fields"]["iban"] == IBAN
    charge = exported["deliveries"][1]
    assert charge["body"]["iban"] == IBAN
    assert f"the bank refuses {IBAN}" in charge["traceback"]
    assert charge["attributes"] == {"account": IBAN}


def test_of_very_many_deliveries_the_oldest_and_the_newest_are_there(
    customer: CustomerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MOST", 4)
    more = [stored(handler=CUSTOMERS, instance_id=customer.pk) for _ in range(6)]

    exported = run(customer.pk)

    names = [d["message_name"] for d in exported["deliveries"]]
    assert exported["deliveries_in_all"] == 9
    assert names[:2] == ["tests.Opened", "tests.Charge"]
    assert [d["id"] for d in exported["deliveries"][2:]] == [str(d.pk) for d in more[-2:]]


@pytest.mark.usefixtures("own_registry")
def test_values_of_every_kind_are_written() -> None:
    define_workflow(SurveyState).started_by(Opened)(lambda message, state, context: None)
    survey = SurveyState.objects.create(reward=Decimal("1.50"), answers={"a": [1, None]})

    fields = run(survey.pk)["instance"]["fields"]

    assert (fields["reward"], fields["answers"]) == ("1.50", {"a": [1, None]})


def test_a_broken_body_is_written_as_its_text(customer: CustomerState) -> None:
    stored(handler=CUSTOMERS, instance_id=customer.pk, body="{broken", status=Status.FAILED)

    bodies = [d["body"] for d in run(customer.pk, "--unmasked")["deliveries"]]

    assert bodies[-1] == "{broken"


def test_it_is_written_to_a_file_that_is_not_there_yet(
    customer: CustomerState, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    output = StringIO()

    call_command("export_instance", str(customer.pk), f"--output={path}", stdout=output)
    with pytest.raises(CommandError, match="cannot be written"):
        call_command("export_instance", str(customer.pk), f"--output={path}", stdout=output)

    assert json.loads(path.read_text())["workflow"] == CUSTOMERS
    assert output.getvalue() == ""


def test_an_unknown_instance_or_workflow_is_an_error(customer: CustomerState) -> None:
    with pytest.raises(CommandError, match="No instance of any workflow has the id"):
        run(uuid7())
    with pytest.raises(CommandError, match=r"Did you mean tests\.CustomerState\?"):
        run(customer.pk, "--workflow=tests.CustomrState")
    with pytest.raises(CommandError, match="is not a UUID"):
        run("5")
