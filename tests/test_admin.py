"""The admin: what it shows, what it lets nobody do, what it asks the database, and the replay."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from uuid_utils.compat import uuid7

from django_workflows import Command, HandlerContext, handles, send
from django_workflows.admin import DeliveryAdmin, WorkflowStateAdmin
from django_workflows.errors import Unrecoverable
from django_workflows.models import Delivery, Status, WorkflowState
from testproject.orders.models import FulfilmentState
from tests.delivering import deliver_due, delivery_of
from tests.models import Note, ParcelState, SurveyState
from tests.pages import confirm, press, select
from tests.processes import ROOT
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERIES = "/admin/django_workflows/delivery/"
PARCELS = "/admin/tests/parcelstate/"
Log = Callable[..., Client]


class PrintLabel(Command, name="tests.PrintLabel"):
    pass


@pytest.fixture
def log_in(client: Client) -> Log:
    """`log_in("view_delivery", ...)` as somebody with these permissions alone."""

    def log_in_with(*permissions: str) -> Client:
        user = User.objects.create_user("somebody", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client.force_login(user)
        return client

    return log_in_with


def page_of(delivery: Delivery) -> str:
    return f"{DELIVERIES}{delivery.pk}/change/"


def shown(response: HttpResponse) -> list[Any]:
    """The primary keys in a list."""
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]  # type: ignore[attr-defined]


def replay(
    client: Client, *deliveries: Delivery, path: str = DELIVERIES, across: bool = False
) -> Any:
    """Choose the replay in the list, and confirm it if that is asked."""
    pks = [delivery.pk for delivery in deliveries]
    response = select(client, path, "replay_selected", pks, across=across)
    return confirm(client, response) if 'name="confirmed"' in response.text else response


def queries_of(client: Client, path: str) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path).status_code == 200
    return [query["sql"] for query in captured.captured_queries]


# What is registered


def test_deliveries_and_every_state_have_an_admin_by_default() -> None:
    states = [model for model in apps.get_models() if issubclass(model, WorkflowState)]

    assert type(admin.site.get_model_admin(Delivery)) is DeliveryAdmin
    assert FulfilmentState in states
    assert {type(admin.site.get_model_admin(state)) for state in states} == {WorkflowStateAdmin}


ADMIN = "django.contrib.admin"


@pytest.mark.parametrize(
    ("installed", "registered"),
    [
        ([ADMIN, "shop", "django_workflows"], ["WorkflowStateAdmin", "ShopAdmin"]),
        ([ADMIN, "django_workflows", "shop"], ["WorkflowStateAdmin", "ShopAdmin"]),
        (["django_workflows", "shop", ADMIN], ["WorkflowStateAdmin", "ShopAdmin"]),
        (["shop", "django_workflows", ADMIN], ["WorkflowStateAdmin", "ShopAdmin"]),
        (["django_workflows", "shop", f"{ADMIN}.apps.SimpleAdminConfig"], []),
    ],
    ids=["own first", "own last", "admin last", "own first, admin last", "no autodiscovery"],
)
def test_a_projects_own_admin_wins_in_whatever_order_the_apps_are_listed(
    installed: list[str], registered: list[str], tmp_path: Path
) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "models.py").write_text(
        "from django_workflows.models import WorkflowState\n"
        "class Cart(WorkflowState): pass\n"
        "class Wish(WorkflowState): pass\n"
    )
    (shop / "admin.py").write_text(
        "from django.contrib import admin\n"
        "from django_workflows.admin import WorkflowStateAdmin\n"
        "from shop.models import Cart\n"
        "@admin.register(Cart)\n"
        "class ShopAdmin(WorkflowStateAdmin): pass\n"
    )
    shown = (
        "from django.contrib import admin\n"
        "found = {m.__name__: type(a).__name__ for m, a in admin.site._registry.items()}\n"
        "print(json.dumps([found[name] for name in ('Wish', 'Cart') if name in found]))\n"
    )

    done = run_with(installed, shown, tmp_path)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == registered


def test_a_project_without_the_admin_starts(tmp_path: Path) -> None:
    shown = "import sys; print('django.contrib.admin.sites' in sys.modules)"

    done = run_with(["django_workflows"], shown, tmp_path)

    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def run_with(installed: list[str], script: str, path: Path) -> Any:
    """Run a script in a project of these apps, which are found in `path`."""
    needed = ["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages"]
    start = (
        "import django, json\n"
        "from django.conf import settings\n"
        f"settings.configure(INSTALLED_APPS={[*needed, *installed]!r}, USE_TZ=True)\n"
        "django.setup()\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", start + script],
        cwd=path,
        env={"PYTHONPATH": f"{path}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.urls("tests.own_site_urls")
def test_links_on_a_site_of_ones_own_stay_on_it(admin_client: Client) -> None:
    instance = ParcelState.objects.create()
    delivery = stored(handler="tests.ParcelState", instance_id=instance.pk)

    response = admin_client.get(f"/backoffice/tests/parcelstate/{instance.pk}/change/")

    assert f"/backoffice/django_workflows/delivery/{delivery.pk}/change/" in response.text
    assert "/admin/django_workflows/" not in response.text


@pytest.mark.urls("tests.own_site_urls")
def test_a_delivery_is_replayed_on_a_site_of_ones_own(admin_client: Client) -> None:
    delivery = stored()

    replay(admin_client, delivery, path="/backoffice/django_workflows/delivery/")

    assert Delivery.objects.get().status == Status.PENDING


# What nobody may do


@pytest.mark.parametrize("make", [stored, ParcelState.objects.create])
def test_rows_are_neither_added_changed_nor_deleted(
    make: Callable[[], Any], admin_client: Client
) -> None:
    row = make()
    name = f"admin:{row._meta.app_label}_{row._meta.model_name}"

    answers = [
        admin_client.get(reverse(f"{name}_add")),
        admin_client.post(reverse(f"{name}_add"), {}),
        admin_client.post(reverse(f"{name}_change", args=[row.pk]), {"customer": "x"}),
        admin_client.post(reverse(f"{name}_delete", args=[row.pk]), {"post": "yes"}),
    ]

    assert [answer.status_code for answer in answers] == [403] * 4
    assert type(row).objects.filter(pk=row.pk).exists()


def test_who_may_not_view_deliveries_sees_none(log_in: Log) -> None:
    delivery = stored()
    client = log_in("replay_delivery")

    answers = [client.get(DELIVERIES), client.get(page_of(delivery)), client.post(DELIVERIES)]

    assert [answer.status_code for answer in answers] == [403] * 3


def test_who_may_not_replay_is_not_offered_it_and_is_refused(log_in: Log) -> None:
    delivery = stored()
    client = log_in("view_delivery")

    response = client.get(DELIVERIES)
    replay(client, delivery)

    assert shown(response) == [delivery.pk]
    assert "replay_selected" not in response.text
    assert Delivery.objects.get().status == Status.FAILED


def test_who_may_not_view_deliveries_sees_an_instance_without_them(log_in: Log) -> None:
    instance = ParcelState.objects.create()
    delivery = stored(handler="tests.ParcelState", instance_id=instance.pk)
    client = log_in("view_parcelstate")

    response = client.get(f"{PARCELS}{instance.pk}/change/")

    assert response.status_code == 200
    assert str(delivery.pk) not in response.text


# Replay


@pytest.mark.usefixtures("own_registry")
def test_a_failed_delivery_is_seen_replayed_and_then_handled(admin_client: Client) -> None:
    is_broken = True

    @handles(PrintLabel, name="tests.print_label")
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        if is_broken:
            raise Unrecoverable("out of ink")
        Note.objects.create(text="label")

    send(PrintLabel())
    deliver_due()
    failed = admin_client.get(f"{DELIVERIES}?status__exact=failed")
    page = admin_client.get(page_of(delivery_of(PrintLabel)))
    is_broken = False

    replay(admin_client, delivery_of(PrintLabel))
    deliver_due()

    assert "out of ink" in failed.text
    assert "Traceback (most recent call last)" in page.text
    assert delivery_of(PrintLabel).status == Status.HANDLED
    assert Note.objects.count() == 1


def test_a_replay_leaves_an_entry_in_the_log_for_each(log_in: Log) -> None:
    deliveries = [stored(), stored(status=Status.CANCELLED)]
    client = log_in("view_delivery", "replay_delivery")

    response = replay(client, *deliveries)

    entries = LogEntry.objects.all()
    assert {entry.object_id for entry in entries} == {str(d.pk) for d in deliveries}
    assert {entry.user.get_username() for entry in entries} == {"somebody"}
    assert "2 deliveries will be handled again." in response.text


def test_of_the_selected_what_cannot_be_replayed_stays_as_it_is(admin_client: Client) -> None:
    failed, handled = stored(), stored(status=Status.HANDLED)

    response = replay(admin_client, failed, handled)

    assert "1 delivery will be handled again." in response.text
    assert Delivery.objects.get(pk=handled.pk).status == Status.HANDLED
    assert [entry.object_id for entry in LogEntry.objects.all()] == [str(failed.pk)]


def test_all_that_match_are_replayed_on_every_page(admin_client: Client) -> None:
    failed = [stored() for _ in range(120)]
    ignored = stored(status=Status.IGNORED)

    path = f"{DELIVERIES}?status__exact=failed"
    replay(admin_client, failed[0], path=path, across=True)

    assert Delivery.objects.filter(status=Status.PENDING).count() == 120
    assert Delivery.objects.get(pk=ignored.pk).status == Status.IGNORED


def test_a_delivery_is_replayed_on_its_own_page(admin_client: Client) -> None:
    delivery = stored()

    asked = press(admin_client, admin_client.get(page_of(delivery)), "replay_selected")
    response = confirm(admin_client, asked)

    assert response.redirect_chain[-1][0] == page_of(delivery)
    assert Delivery.objects.get().status == Status.PENDING
    assert LogEntry.objects.get().object_id == str(delivery.pk)


# What the database is asked


@pytest.mark.parametrize("path", [DELIVERIES, PARCELS])
def test_an_empty_list_is_shown(path: str, admin_client: Client) -> None:
    response = admin_client.get(path)

    assert shown(response) == []


@pytest.mark.parametrize(
    ("path", "make"),
    [
        (DELIVERIES, stored),
        (f"{DELIVERIES}?status__exact=failed", stored),
        (f"{DELIVERIES}?handler=orders.take_payment", stored),
        (PARCELS, ParcelState.objects.create),
        (
            "/admin/tests/surveystate/",
            lambda: SurveyState.objects.create(note=Note.objects.create(text="n")),
        ),
    ],
)
def test_a_list_counts_no_rows_and_asks_no_more_for_many(
    path: str, make: Callable[[], Any], admin_client: Client
) -> None:
    make()
    few = queries_of(admin_client, path)
    for _ in range(120):
        make()

    many = queries_of(admin_client, path)

    assert len(many) == len(few) <= 4  # session, user, one page of rows, is there another
    assert not [sql for sql in many if "COUNT(" in sql.upper()]
    assert not [sql for sql in many if "DISTINCT" in sql.upper()]


def test_a_list_reads_no_bodies_and_no_tracebacks(admin_client: Client) -> None:
    stored()

    queries = queries_of(admin_client, DELIVERIES)

    assert not [sql for sql in queries if '"body"' in sql or '"traceback"' in sql]


def test_an_instance_with_many_deliveries_asks_no_more(admin_client: Client) -> None:
    instance = ParcelState.objects.create()
    path = f"{PARCELS}{instance.pk}/change/"
    stored(instance_id=instance.pk)
    queries_of(admin_client, path)  # content types are read once per process
    few = queries_of(admin_client, path)
    for _ in range(20):
        stored(instance_id=instance.pk)

    many = queries_of(admin_client, path)

    assert len(many) == len(few) <= 12


def test_older_rows_are_on_further_pages_and_there_is_none_after_the_last(
    admin_client: Client,
) -> None:
    pks = [stored().pk for _ in range(80)]

    first = admin_client.get(DELIVERIES)
    second = admin_client.get(f"{DELIVERIES}?p=2")
    third = admin_client.get(f"{DELIVERIES}?p=3")

    assert shown(first) + shown(second) == pks[::-1]
    assert 'href="?p=2" rel="next"' in first.text
    assert 'rel="next"' not in second.text
    assert third.status_code == 302


@pytest.mark.parametrize("page", ["0", "-1", "x", "9" * 30])
def test_a_page_that_cannot_be_shows_no_error(page: str, admin_client: Client) -> None:
    pks = [stored().pk for _ in range(51)]

    response = admin_client.get(f"{DELIVERIES}?p={page}", follow=True)

    assert shown(response) == pks[:0:-1]


@pytest.mark.parametrize("query", ["body__contains=x", "o=1", "correlation_id__exact=1"])
def test_nothing_is_sorted_or_filtered_by_a_column_without_an_index(
    query: str, admin_client: Client
) -> None:
    pks = [stored(message_name=name).pk for name in ("b.B", "a.A", "c.C")]

    response = admin_client.get(f"{DELIVERIES}?{query}")

    assert response.status_code == 400 or shown(response) == pks[::-1]
    assert (response.status_code == 400) == query.startswith(("body", "correlation"))


# Search and filters


def test_a_delivery_is_found_by_each_of_its_ids(admin_client: Client) -> None:
    conversation, instance = uuid7(), uuid7()
    wanted = stored(correlation_id=conversation, instance_id=instance)
    stored()

    found = [
        shown(admin_client.get(f"{DELIVERIES}?q=  {wanted_id}"))
        for wanted_id in (wanted.pk, wanted.message_id, instance, conversation)
    ]

    assert found == [[wanted.pk]] * 4


@pytest.mark.parametrize("term", ["orders.TakePayment", "019", "%", "'", "\\"])
def test_what_is_no_id_finds_nothing(term: str, admin_client: Client) -> None:
    stored()

    response = admin_client.get(DELIVERIES, {"q": term})

    assert shown(response) == []


def test_an_instance_is_found_by_its_id_and_by_indexed_fields_as_a_whole(
    admin_client: Client,
) -> None:
    order = uuid7()
    wanted = ParcelState.objects.create(order_id=order, customer="Ada Lovelace", number=7)
    ParcelState.objects.create(customer="Ada", number=70)

    found = [
        shown(admin_client.get(PARCELS, {"q": term}))
        for term in (str(wanted.pk), str(order), "Ada Lovelace", "7", "Lovelace", "9" * 30)
    ]

    assert found == [[wanted.pk]] * 4 + [[], []]


def test_a_filter_without_an_index_looks_at_a_day_until_told_otherwise(
    admin_client: Client,
) -> None:
    new = stored(status=Status.IGNORED)
    old = stored(status=Status.IGNORED, id=id_of(timedelta(days=2)))

    default = shown(admin_client.get(f"{DELIVERIES}?status__exact=ignored"))
    month = shown(admin_client.get(f"{DELIVERIES}?status__exact=ignored&created=month"))
    any_time = shown(admin_client.get(f"{DELIVERIES}?status__exact=ignored&created=any"))
    unfiltered = shown(admin_client.get(DELIVERIES))

    assert default == [new.pk]
    assert month == any_time == unfiltered == [new.pk, old.pk]


def test_failed_deliveries_of_any_age_are_shown(admin_client: Client) -> None:
    old = stored(id=id_of(timedelta(days=400)))

    response = admin_client.get(f"{DELIVERIES}?status__exact=failed")

    assert shown(response) == [old.pk]


@pytest.mark.parametrize(
    "query",
    [
        "handler=orders.take_payment",
        "message=orders.TakePayment",
        "created=hour",
        "status__exact=pending",
    ],
)
def test_deliveries_are_filtered(query: str, admin_client: Client) -> None:
    wanted = stored(status=Status.PENDING)
    stored(handler="x.y", message_name="x.Y", id=id_of(timedelta(hours=2)))

    response = admin_client.get(f"{DELIVERIES}?{query}")

    assert shown(response) == [wanted.pk]


def id_of(age: timedelta) -> UUID:
    """The id of a delivery of this age."""
    return UUID(int=int((timezone.now() - age).timestamp() * 1000) << 80 | uuid7().int % (1 << 80))


# What is shown

SCRIPT = "<script>alert('1')</script>"


def test_whatever_a_row_holds_is_escaped(admin_client: Client) -> None:
    instance = ParcelState.objects.create(customer=SCRIPT, seen=[SCRIPT])
    delivery = stored(
        instance_id=instance.pk,
        message_name=SCRIPT,
        handler=SCRIPT,
        body=json.dumps({"text": SCRIPT}),
        attributes={SCRIPT: SCRIPT},
        sticky_attributes={SCRIPT: SCRIPT},
        reason=SCRIPT,
        error=f"ValueError: {SCRIPT}",
        traceback=SCRIPT,
        failures=[{"attempt": SCRIPT, "at": SCRIPT, "error": SCRIPT}],
        changes={SCRIPT: [SCRIPT, SCRIPT]},
        step=SCRIPT,
        sender=SCRIPT,
        sender_step=SCRIPT,
        part=SCRIPT,
    )

    for path in (DELIVERIES, page_of(delivery), PARCELS, f"{PARCELS}{instance.pk}/change/"):
        text = admin_client.get(path).text

        assert "alert(" in text, path
        assert "<script>alert" not in text, path


@pytest.mark.parametrize(
    ("body", "shows"),
    [
        ('{"amount": "3", "nested": {"a": [1]}}', "&quot;amount&quot;: &quot;3&quot;,\n"),
        ("edited by hand {", "edited by hand {"),
        (r'{"text": "\ud800"}', r"\ud800"),
        ("[" * 100_000, "[[[["),
        ('{"text": "' + "x" * 200_000 + '"}', "…"),
    ],
    ids=["indented", "nonsense", "lone surrogate", "deep", "long"],
)
def test_any_body_is_shown(body: str, shows: str, admin_client: Client) -> None:
    delivery = stored(body=body)

    response = admin_client.get(page_of(delivery))

    assert response.status_code == 200
    assert shows in response.text


def test_the_page_of_a_delivery_shows_its_attempts_and_leads_to_its_instances(
    admin_client: Client,
) -> None:
    failures = [{"at": "2026-03-01T09:00:00+00:00", "attempt": 1, "error": "ValueError: no ink"}]
    asker = FulfilmentState.objects.create(order_id=uuid7(), amount=1)
    delivery = stored(
        failures=failures,
        attempts=1,
        sender="orders.FulfilmentState",
        sender_instance_id=asker.pk,
    )

    response = admin_client.get(page_of(delivery))

    assert "2026-03-01 09:00:00" in response.text
    assert "ValueError: no ink" in response.text
    assert f"/admin/orders/fulfilmentstate/{asker.pk}/change/" in response.text


def test_an_instance_leads_to_the_one_that_started_it(admin_client: Client) -> None:
    parent = FulfilmentState.objects.create(order_id=uuid7(), amount=1)
    child = ParcelState.objects.create(
        starter_workflow="orders.FulfilmentState", starter_id=parent.pk
    )

    response = admin_client.get(f"{PARCELS}{child.pk}/change/")

    assert f"/admin/orders/fulfilmentstate/{parent.pk}/change/" in response.text


def test_no_page_has_javascript_in_it(admin_client: Client) -> None:
    instance = ParcelState.objects.create()
    delivery = stored(instance_id=instance.pk)

    for path in (DELIVERIES, page_of(delivery), PARCELS, f"{PARCELS}{instance.pk}/change/"):
        text = admin_client.get(path).text

        tags = re.findall(r"<script[^>]*>", text)
        assert all("src=" in tag for tag in tags), path
        assert not re.search(r"\son\w+=|javascript:|\sstyle=", text), path
