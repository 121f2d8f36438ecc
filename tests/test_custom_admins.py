"""Sites and admins of a project's own, and a theme that replaces the admin's templates."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from uuid_utils.compat import uuid7

from django_workflows.models import Delivery, Status
from testproject.orders.models import FulfilmentState
from tests.models import ParcelState
from tests.own_admins_urls import site
from tests.pages import buttons_on, confirm, press, select
from tests.processes import ROOT, environment
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)


# A site of one's own


@pytest.mark.urls("tests.own_site_urls")
def test_every_act_on_a_site_of_ones_own_stays_on_it(admin_client: Client) -> None:
    delivery = stored()
    own = f"/backoffice/django_workflows/delivery/{delivery.pk}/change/"

    page = admin_client.get(own)
    asked = press(admin_client, page, "replay_selected")
    done = confirm(admin_client, asked)
    for response in (page, asked, done):
        assert "/admin/django_workflows/" not in response.text

    assert done.redirect_chain[-1][0] == own
    assert Delivery.objects.get().status == Status.PENDING


@pytest.mark.urls("tests.own_site_urls")
def test_a_body_is_edited_on_a_site_of_ones_own(admin_client: Client) -> None:
    delivery = stored()

    response = admin_client.get(f"/backoffice/django_workflows/delivery/{delivery.pk}/edit-body/")

    assert response.status_code == 200
    assert "/admin/django_workflows/" not in response.text


# Admins of one's own


DELIVERIES = "/shop/django_workflows/delivery/"
ON_OWN_SITE = pytest.mark.urls("tests.own_admins_urls")


@ON_OWN_SITE
def test_what_ones_own_admin_hides_is_neither_seen_nor_acted_on(admin_client: Client) -> None:
    ours, theirs = stored(attributes={"tenant": "acme"}), stored(attributes={"tenant": "x"})

    answers = [
        admin_client.get(f"{DELIVERIES}{theirs.pk}/{page}/", follow=True)
        for page in ("change", "edit-body")
    ]
    asked = select(admin_client, DELIVERIES, "replay_selected", [ours.pk, theirs.pk])
    confirm(admin_client, asked)

    assert "exist" in answers[0].text  # Django leads back to the index, and says so
    assert answers[1].status_code == 404
    assert Delivery.objects.get(pk=ours.pk).status == Status.PENDING
    assert Delivery.objects.get(pk=theirs.pk).status == Status.FAILED


@ON_OWN_SITE
def test_actions_of_ones_own_are_offered_next_to_ours(admin_client: Client) -> None:
    row = stored(attributes={"tenant": "acme"})

    listed = admin_client.get(DELIVERIES)
    done = select(admin_client, DELIVERIES, "count_them", [row.pk])

    assert {"count_them", "replay_selected"} <= {
        name for name, _text in listed.context["action_form"].fields["action"].choices
    }
    assert "There are 1." in done.text


@ON_OWN_SITE
def test_an_admin_of_ones_own_keeps_the_timeline_and_the_buttons(admin_client: Client) -> None:
    instance = ParcelState.objects.create(customer="Ada Lovelace")

    listed = admin_client.get("/shop/tests/parcelstate/")
    page = admin_client.get(f"/shop/tests/parcelstate/{instance.pk}/change/")

    assert "Ada Lovelace" in listed.text
    assert 'id="workflows-timeline"' in page.text
    assert buttons_on(page) == ["cancel_instances"]


def test_a_sensitive_field_in_ones_own_lists_and_fieldsets_is_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ParcelState, "sensitive_fields", ("customer", "weight"))
    request = RequestFactory().get("/")
    request.user = User.objects.create_user("somebody", is_staff=True)
    instance = ParcelState(customer="Ada Lovelace", number=1)
    own = site.get_model_admin(ParcelState)

    columns = own.get_list_display(request)
    [(_title, options)] = own.get_fieldsets(request, instance)

    assert "customer" not in columns
    assert columns[0](instance) == options["fields"][0](instance) == "*****"
    assert options["fields"][1][0] == "number"


# A theme

PAGES = ("deliveries", "failed", "delivery", "edit", "instances", "instance")


@pytest.fixture
def visited(database_url: str, admin_user: User) -> dict[str, Any]:
    """What every page of ours looks like under django-unfold."""
    if importlib.util.find_spec("unfold") is None:
        pytest.skip("needs the theme: pip install django-unfold (which needs Python 3.12)")
    instance = FulfilmentState.objects.create(order_id=uuid7(), amount=1)
    stored(
        sender="orders.FulfilmentState",
        sender_instance_id=instance.pk,
        error="ValueError: no ink",
        body=json.dumps({"order_id": str(instance.order_id), "amount": "1.00"}),
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.themed.visit"],
        cwd=ROOT,
        env={
            **environment(database_url, "db://", {}),
            "DJANGO_SETTINGS_MODULE": "tests.themed.settings",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    return dict(json.loads(done.stdout))


def test_every_page_and_a_replay_work_under_a_theme(visited: dict[str, Any]) -> None:
    for themed in ("admin", "backoffice"):
        assert [visited[f"{themed} {page}"] for page in PAGES] == [200] * len(PAGES)
        assert "unfold" in visited[f"{themed} instance text"], "the theme is there"
        assert 'id="workflows-timeline"' in visited[f"{themed} instance text"]
        assert "this holds it up" in visited[f"{themed} instance text"]
        assert {"replay_selected", "skip_selected"} == set(visited[f"{themed} buttons"])
        assert visited[f"{themed} asked"] == 200
        assert visited[f"{themed} replayed"] == "pending"
