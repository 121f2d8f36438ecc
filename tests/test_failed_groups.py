"""What failed alike: the groups, their page, and the replay of one of them."""

import dataclasses
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_workflows import Command, HandlerContext, handles, send
from django_workflows.admin import actions, failed
from django_workflows.errors import Unrecoverable
from django_workflows.failures import failed_groups, group_of
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import Note
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERIES = "/admin/django_workflows/delivery/"
GROUPS = f"{DELIVERIES}failed/"
REPLAY = f"{GROUPS}replay/"
NASTY = """<script>alert(1)</script>"'&\u202e"""
Log = Callable[..., Client]


class Print(Command, name="tests.groups.Print"):
    text: str = "x"


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


def address(handler: str = "orders.take_payment", error_class: str = "ValueError") -> str:
    return f"{REPLAY}?{urlencode({'handler': handler, 'error_class': error_class})}"


def press(client: Client, page: Any) -> Any:
    """Press the button of the page, with what its form carries."""
    form = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.content.decode())
    path = f"{page.request['PATH_INFO']}?{page.request['QUERY_STRING']}"
    return client.post(path, dict(form), follow=True)


def confirm(client: Client, page: Any) -> Any:
    """Press the button of the confirmation, and then of each page that says how far it is."""
    while 'class="workflows-confirm"' in page.content.decode():
        page = press(client, page)
    return page


def said(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


# The class of an error


def test_a_failure_is_recorded_with_the_class_of_its_error(own_registry: Any) -> None:
    @handles(Print, unrecoverable=[ZeroDivisionError])
    def print_it(message: Print, context: HandlerContext) -> None:
        raise ZeroDivisionError("no")

    send(Print())
    deliver_due()

    assert delivery_of(Print).error_class == "ZeroDivisionError"


def test_the_class_of_a_projects_error_has_its_module(own_registry: Any) -> None:
    @handles(Print)
    def print_it(message: Print, context: HandlerContext) -> None:
        raise Unrecoverable("no")

    send(Print())
    deliver_due()

    assert delivery_of(Print).error_class == "django_workflows.errors.Unrecoverable"


# The groups


def test_what_failed_alike_is_one_group() -> None:
    now = timezone.now()
    for minutes in (3, 1, 2):
        stored(error_class="ValueError", ended_at=now - timedelta(minutes=minutes))
    stored(error_class="KeyError")
    stored(error_class="ValueError", handler="orders.ship_order")
    stored(error_class="ValueError", status=Status.HANDLED)

    found = failed_groups()

    assert [(g.handler, g.error_class, g.count) for g in found] == [
        ("orders.take_payment", "ValueError", 3),
        ("orders.ship_order", "ValueError", 1),
        ("orders.take_payment", "KeyError", 1),
    ]
    first = found.groups[0]
    assert (first.first_at, first.last_at) == (
        now - timedelta(minutes=3),
        now - timedelta(minutes=1),
    )
    assert (found.examined, found.is_complete, found.left_out) == (5, True, 0)


def test_the_example_of_a_group_is_its_newest() -> None:
    rows = [stored(error_class="ValueError", error=f"ValueError: {i}") for i in range(3)]

    [group] = failed_groups()

    assert group.example == rows[-1]
    assert group.example.error == "ValueError: 2"


def test_a_handlers_old_name_is_in_the_group_of_its_name(own_registry: Any) -> None:
    @handles(Print, name="tests.new", aliases=["tests.old"])
    def print_it(message: Print, context: HandlerContext) -> None: ...

    old, new = (stored(handler=f"tests.{name}", error_class="E") for name in ("old", "new"))

    [group] = failed_groups()

    assert (group.handler, group.count) == ("tests.new", 2)
    assert set(group_of("tests.new", "E")) == {old, new}


def test_of_very_many_only_the_newest_are_counted() -> None:
    for i in range(5):
        stored(error_class=f"Error{i}")

    found = failed_groups(examined=3)

    assert {group.error_class for group in found} == {"Error2", "Error3", "Error4"}
    assert (found.examined, found.is_complete) == (3, False)


def test_exactly_as_many_as_are_examined_is_complete() -> None:
    for _ in range(3):
        stored(error_class="E")

    found = failed_groups(examined=3)

    assert (found.examined, found.is_complete) == (3, True)


def test_the_smallest_of_very_many_groups_are_left_out() -> None:
    for name in ("A", "B", "B", "C"):
        stored(error_class=name)

    found = failed_groups(limit=2)

    assert [group.error_class for group in found] == ["B", "A"]
    assert found.left_out == 1


# The page


@pytest.mark.parametrize("path", [GROUPS, address()])
def test_nobody_sees_the_pages_without_permission(log_in: Log, path: str) -> None:
    client = log_in("view_parcelstate")

    assert client.get(path).status_code == 403


def test_the_page_shows_each_group_with_a_link_to_its_deliveries(log_in: Log) -> None:
    row = stored(error_class="ValueError", error="ValueError: out of ink")
    stored(error_class="KeyError")
    client = log_in("view_delivery")

    page = client.get(GROUPS)

    text = page.content.decode()
    assert "out of ink" in text
    link = next(r.list_url for r in page.context["rows"] if r.group.error_class == "ValueError")
    assert [d.pk for d in client.get(link).context["cl"].result_list] == [row.pk]


def test_the_link_of_a_group_leads_to_old_ones_and_to_those_without_a_class(log_in: Log) -> None:
    old = stored(id="01900000-0000-7000-8000-000000000000", error_class="")
    stored(error_class="E")
    client = log_in("view_delivery")

    page = client.get(GROUPS)

    link = next(r.list_url for r in page.context["rows"] if not r.group.error_class)
    assert [str(d.pk) for d in client.get(link).context["cl"].result_list] == [str(old.pk)]


def test_only_who_may_replay_is_offered_it(log_in: Log) -> None:
    stored(error_class="E")

    page = log_in("view_delivery").get(GROUPS)

    assert "Replay group" not in page.content.decode()
    assert page.client.get(address()).status_code == 403
    assert (
        page.client.post(address(), {"confirmed": "2026-01-01T00:00:00+00:00"}).status_code == 403
    )


def test_the_page_says_so_when_more_have_failed_than_it_counts(
    log_in: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = failed_groups(examined=0)
    stored(error_class="E")
    found = failed_groups(examined=0)
    monkeypatch.setattr(failed.failures, "failed_groups", lambda: found)

    text = log_in("view_delivery").get(GROUPS).content.decode()

    assert "More have failed than are counted here" in text


def test_names_and_errors_are_text_and_nothing_else(log_in: Log) -> None:
    stored(handler=NASTY, error_class=NASTY, error=NASTY * 100, message_name=NASTY)
    client = log_in("view_delivery", "replay_delivery", "view_sensitive")

    pages = [client.get(GROUPS), client.get(address(NASTY, NASTY))]

    for page in pages:
        assert page.status_code == 200
        assert "<script>alert" not in page.content.decode()
        assert "&lt;script&gt;alert" in page.content.decode()


def test_an_error_is_masked_for_who_may_not_see_what_is_sensitive(log_in: Log) -> None:
    stored(message_name="gone.Message", handler="gone", error_class="E", error="E: secret")

    hidden = log_in("view_delivery").get(GROUPS).content.decode()
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_sensitive"))
    shown = Client()
    shown.force_login(User.objects.get())

    assert "secret" not in hidden
    assert "secret" in shown.get(GROUPS).content.decode()


@pytest.mark.parametrize("groups", [0, 1, 150])
def test_the_pages_take_few_queries_and_little_space(log_in: Log, groups: int) -> None:
    for i in range(groups):
        stored(error_class=f"Error{i}", error="x" * 5000)
    client = log_in("view_delivery", "replay_delivery")

    with CaptureQueriesContext(connection) as captured:
        page = client.get(GROUPS)

    assert page.status_code == 200
    assert len(captured) <= 12
    assert len(page.content) <= 300_000


# The replay


def test_the_confirmation_says_exactly_what_will_happen(log_in: Log) -> None:
    for _ in range(12):
        stored(error_class="ValueError")
    stored(error_class="ValueError", message_name="orders.Other", undoes=True)
    stored(error_class="KeyError")

    page = log_in("view_delivery", "replay_delivery").get(address())

    text = page.content.decode()
    assert page.context["preview"].groups == [
        ("orders.TakePayment", "orders.take_payment", "failed", False, 12),
        ("orders.Other", "orders.take_payment", "failed", True, 1),
    ]
    assert "13 deliveries" in text
    assert "The last error of each was ValueError." in text
    assert "1 is an undo command" in text
    assert "What still fails is back in this group." in text
    assert "declare" not in text
    assert Delivery.objects.filter(status=Status.FAILED).count() == 14


def test_a_group_is_replayed_and_each_of_it_has_an_entry_in_the_log(log_in: Log) -> None:
    rows = [stored(error_class="ValueError") for _ in range(3)]
    other = stored(error_class="KeyError")
    client = log_in("view_delivery", "replay_delivery")

    done = confirm(client, client.get(address()))

    assert said(done) == ["3 deliveries will be handled again."]
    assert set(Delivery.objects.filter(status=Status.PENDING)) == set(rows)
    other.refresh_from_db()
    assert other.status == Status.FAILED
    assert {entry.object_id for entry in LogEntry.objects.all()} == {str(row.pk) for row in rows}


def test_what_failed_after_the_confirmation_was_shown_is_not_replayed(log_in: Log) -> None:
    stored(error_class="ValueError")
    client = log_in("view_delivery", "replay_delivery")
    page = client.get(address())
    late = stored(error_class="ValueError")

    done = confirm(client, page)

    assert said(done) == ["1 delivery will be handled again."]
    late.refresh_from_db()
    assert late.status == Status.FAILED


def test_pressing_the_button_twice_replays_nothing_twice(log_in: Log) -> None:
    stored(error_class="ValueError")
    client = log_in("view_delivery", "replay_delivery")
    page = client.get(address())
    confirm(client, page)

    done = confirm(client, page)

    assert said(done) == ["Nothing of this group has failed any more: it was replayed, or deleted."]
    assert LogEntry.objects.count() == 1


def test_a_large_group_is_replayed_in_parts_and_says_how_far_it_is(
    log_in: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "SECONDS_PER_PART", 0.0)
    monkeypatch.setattr(failed, "REPLAY", dataclasses.replace(failed.REPLAY, batch=2))
    for _ in range(5):
        stored(error_class="ValueError")
    client = log_in("view_delivery", "replay_delivery")
    page = client.get(address())

    part = press(client, page)
    replayed_first = Delivery.objects.filter(status=Status.PENDING).count()
    done = confirm(client, part)

    assert "<strong>2</strong> of 5 done." in part.content.decode()
    assert replayed_first == 2
    assert said(done) == ["5 deliveries will be handled again."]


def test_the_confirmation_warns_of_a_handler_that_nothing_declares(log_in: Log) -> None:
    stored(handler="gone", error_class="ValueError")

    page = log_in("view_delivery", "replay_delivery").get(address("gone"))

    assert any("gone" in sentence for sentence in page.context["follows"])


def test_a_group_that_is_gone_says_so(log_in: Log) -> None:
    page = log_in("view_delivery", "replay_delivery").get(address(), follow=True)

    assert page.redirect_chain == [(GROUPS, 302)]
    assert said(page) == ["Nothing of this group has failed any more: it was replayed, or deleted."]


def test_a_replayed_group_is_handled_once_each(log_in: Log, own_registry: Any) -> None:
    broken = [True]

    @handles(Print, attempts=1)
    def print_it(message: Print, context: HandlerContext) -> None:
        if broken[0]:
            raise ValueError("a bug")
        Note.objects.create(text=message.text)

    for i in range(4):
        send(Print(text=str(i)))
    deliver_due()
    broken.clear()
    broken.append(False)
    client = log_in("view_delivery", "replay_delivery")

    confirm(client, client.get(address("tests.print_it")))
    deliver_due()

    assert sorted(Note.objects.values_list("text", flat=True)) == ["0", "1", "2", "3"]
    assert failed_groups().groups == []


@pytest.mark.urls("tests.own_site_urls")
def test_the_pages_work_on_a_site_of_ones_own(log_in: Log) -> None:
    stored(error_class="ValueError")
    client = log_in("view_delivery", "replay_delivery")

    page = client.get(GROUPS.replace("admin", "backoffice", 1))

    [row] = page.context["rows"]
    links = (row.list_url, row.example_url, row.replay_url)
    assert all(link.startswith("/backoffice/") for link in links)
    assert all(client.get(link).status_code == 200 for link in links)
