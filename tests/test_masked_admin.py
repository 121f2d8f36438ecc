"""What is sensitive is masked on every page of the admin, unless the viewer may see it."""

from typing import Annotated

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Sensitive,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
)
from django_workflows.errors import Unrecoverable
from django_workflows.messages import MASK
from django_workflows.models import Delivery
from django_workflows.registry import Registry
from tests.delivering import deliver_due, delivery_of
from tests.models import CustomerState

pytestmark = pytest.mark.django_db(transaction=True)

IBAN = "DE89370400440532013000"
DELIVERIES = "/admin/django_workflows/delivery/"
CUSTOMERS = "/admin/tests/customerstate/"
#: Pages that show it to who may see it.
SHOWING = (
    "list of failed ones",
    "groups of failed ones",
    "handled delivery",
    "failed delivery",
    "list of instances",
    "instance",
)


class Opened(Event, name="tests.Opened"):
    name: str
    iban: Annotated[str, Sensitive()] = IBAN


class Charge(Command, name="tests.Charge"):
    iban: Annotated[str, Sensitive()]


@pytest.fixture(autouse=True)
def customer(own_registry: Registry) -> CustomerState:
    """One whose state, deliveries, errors and attributes hold what not everybody may see."""
    customers = define_workflow(CustomerState)

    @customers.started_by(Opened)
    def opened(message: Opened, state: CustomerState, context: WorkflowContext) -> None:
        state.name, state.iban = message.name, message.iban
        context.send(Charge(iban=message.iban), sticky_attributes={"account": message.iban})

    @handles(Charge, name="tests.charge")
    def charge(message: Charge, context: HandlerContext) -> None:
        raise Unrecoverable(f"the bank refuses {message.iban}")

    publish(Opened(name="Ada Lovelace"))
    deliver_due()
    return CustomerState.objects.get()


def log_in(client: Client, *more: str) -> Client:
    permissions = ("view_delivery", "view_customerstate", "edit_delivery", *more)
    user = User.objects.create_user(f"somebody {len(more)}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def pages() -> dict[str, str]:
    opened, charge = delivery_of(Opened), delivery_of(Charge)
    return {
        "list of deliveries": f"{DELIVERIES}?created=any",
        "list of failed ones": f"{DELIVERIES}?status__exact=failed",
        "groups of failed ones": f"{DELIVERIES}failed/",
        "handled delivery": f"{DELIVERIES}{opened.pk}/change/",
        "failed delivery": f"{DELIVERIES}{charge.pk}/change/",
        "list of instances": CUSTOMERS,
        "instance": f"{CUSTOMERS}{CustomerState.objects.get().pk}/change/",
        "overview": "/admin/django_workflows/",
    }


def shown(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, path
    return response.content.decode()


@pytest.mark.parametrize("page", ["list of deliveries", *SHOWING, "overview"])
def test_no_page_shows_it_to_who_may_not_see_it(client: Client, page: str) -> None:
    log_in(client)

    text = shown(client, pages()[page])

    assert IBAN not in text


@pytest.mark.parametrize("page", SHOWING)
def test_who_may_see_it_sees_it(client: Client, page: str) -> None:
    log_in(client, "view_sensitive")

    text = shown(client, pages()[page])

    assert IBAN in text
    assert MASK not in text


def test_what_is_not_sensitive_is_shown_to_all(client: Client) -> None:
    log_in(client)

    handled, failed = pages()["handled delivery"], pages()["failed delivery"]

    assert "Ada Lovelace" in shown(client, handled)
    assert "Ada Lovelace" in shown(client, pages()["instance"])
    assert f"the bank refuses {MASK}" in shown(client, failed)


def test_a_search_does_not_tell_whose_it_is(client: Client, customer: CustomerState) -> None:
    found = log_in(client).get(CUSTOMERS, {"q": IBAN}).context["cl"].result_list
    by_id = client.get(CUSTOMERS, {"q": str(customer.pk)}).context["cl"].result_list

    assert list(found) == []
    assert list(by_id) == [customer]


def test_who_may_see_it_finds_by_it(client: Client, customer: CustomerState) -> None:
    found = log_in(client, "view_sensitive").get(CUSTOMERS, {"q": IBAN}).context["cl"].result_list

    assert list(found) == [customer]


def test_the_bodies_of_messages_that_are_unknown_are_masked(client: Client) -> None:
    Delivery.objects.filter(message_name="tests.Charge").update(message_name="gone.Away")
    gone = Delivery.objects.get(message_name="gone.Away")
    log_in(client)

    assert IBAN not in shown(client, f"{DELIVERIES}{gone.pk}/change/")


def test_a_body_that_may_not_be_seen_cannot_be_edited(client: Client) -> None:
    charge = delivery_of(Charge)
    log_in(client, "replay_delivery")

    response = client.get(f"{DELIVERIES}{charge.pk}/edit-body/")

    assert response.status_code == 403


def test_nothing_of_a_masked_page_is_written_back(client: Client) -> None:
    before = Delivery.objects.get(message_name="tests.Charge").body
    log_in(client, "replay_delivery")

    client.post(pages()["failed delivery"], {"body": MASK, "_save": "Save"})

    assert Delivery.objects.get(message_name="tests.Charge").body == before
    assert LogEntry.objects.count() == 0
