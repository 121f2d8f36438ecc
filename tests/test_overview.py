"""The overview in the admin, and the page of a process: what they say, to whom, and their cost."""

import html
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from xml.etree import ElementTree

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_workflows import Command, HandlerContext, define_workflow, handles, status
from django_workflows.admin.charts import chart, sparkline
from django_workflows.admin.overview import SHOWN, lasting
from django_workflows.models import Lifecycle, Status, Worker
from django_workflows.status import Bar, Figure
from testproject.orders.models import FulfilmentState
from tests.models import TallyState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

APP = "/admin/django_workflows/"
DELIVERIES = f"{APP}delivery/"
OVERVIEW = f"{DELIVERIES}overview/"
GRAPH = f"{DELIVERIES}graph/"
NASTY = """<script>alert(1)</script>"'&\u202e"""
Log = Callable[..., Client]


class Begin(Command, name="tests.overview.Begin"):
    key: str


@pytest.fixture
def log_in(client: Client) -> Log:
    """`log_in("django_workflows.view_delivery", ...)` as somebody with these permissions alone."""

    def log_in_with(*permissions: str) -> Client:
        user = User.objects.create_user("somebody", is_staff=True)
        for permission in permissions:
            app, codename = permission.split(".")
            user.user_permissions.add(
                Permission.objects.get(content_type__app_label=app, codename=codename)
            )
        client.force_login(user)
        return client

    return log_in_with


VIEW = ("django_workflows.view_delivery", "orders.view_fulfilmentstate")


def text_of(response: Any) -> str:
    assert response.status_code == 200
    return str(response.content.decode())


def order(**fields: Any) -> FulfilmentState:
    return FulfilmentState.objects.create(order_id=uuid.uuid4(), amount=1, **fields)


def row_of(page: Any, name: str) -> Any:
    return next(
        r for r in (*page.context["workflows"], *page.context["handlers"]) if r.name == name
    )


# Who sees it


@pytest.mark.parametrize("path", [OVERVIEW, f"{GRAPH}?workflow=orders.FulfilmentState"])
def test_nobody_sees_the_pages_without_permission(log_in: Log, path: str) -> None:
    client = log_in("tests.view_parcelstate")

    assert client.get(path).status_code == 403


@pytest.mark.parametrize("path", [OVERVIEW, GRAPH])
def test_nobody_sees_the_pages_without_logging_in(client: Client, path: str) -> None:
    answer = client.get(path)

    assert answer.status_code == 302
    assert "/login/" in answer["Location"]


def test_only_workflows_that_the_viewer_may_see_are_listed(log_in: Log) -> None:
    page = log_in(*VIEW).get(OVERVIEW)

    assert [row.name for row in page.context["workflows"]] == ["orders.FulfilmentState"]


def test_the_process_of_a_workflow_needs_the_permission_for_it(log_in: Log) -> None:
    client = log_in(*VIEW)

    assert client.get(f"{GRAPH}?workflow=orders.CreditCheckState").status_code == 403
    assert client.get(f"{GRAPH}?workflow=orders.FulfilmentState").status_code == 200


def test_a_process_that_nothing_declares_is_not_found(log_in: Log) -> None:
    client = log_in(*VIEW)

    assert client.get(f"{GRAPH}?workflow=gone").status_code == 404
    assert client.get(GRAPH).status_code == 404


# What it says


def test_it_counts_instances_by_what_has_become_of_them(log_in: Log) -> None:
    for lifecycle in ("running", "running", "failed", "compensating", "completed"):
        order(lifecycle=lifecycle)

    row = row_of(log_in(*VIEW).get(OVERVIEW), "orders.FulfilmentState")

    assert {name: figure.value for name, figure, _url in row.lifecycles} == {
        "running": 2,
        "compensating": 1,
        "failed": 1,
        "completed": 1,
    }


def test_its_links_lead_to_what_was_counted(log_in: Log) -> None:
    failed, oldest = order(lifecycle=Lifecycle.FAILED), order()
    order()
    client = log_in(*VIEW)

    row = row_of(client.get(OVERVIEW), "orders.FulfilmentState")

    link = next(url for name, _figure, url in row.lifecycles if name == "failed")
    assert [i.pk for i in client.get(link).context["cl"].result_list] == [failed.pk]
    assert str(oldest.pk) in row.oldest_running_url
    assert client.get(row.oldest_running_url).status_code == 200


def test_it_says_what_is_due_overdue_waiting_and_failed(log_in: Log) -> None:
    now = timezone.now()
    stored(status=Status.PENDING, due_at=now - timedelta(hours=3), relay_at=now)
    stored(status=Status.PENDING, due_at=now - timedelta(seconds=5), relay_at=now)
    later = now + timedelta(days=1)
    stored(status=Status.PENDING, due_at=later, relay_at=later)
    stored()

    page = log_in(*VIEW).get(OVERVIEW)

    backlog = row_of(page, "orders.take_payment").figures.backlog
    assert [
        figure.value for figure in (backlog.due, backlog.overdue, backlog.waiting, backlog.failed)
    ] == [2, 1, 1, 1]
    assert row_of(page, "orders.take_payment").oldest_due == "3 h"
    assert page.context["oldest_due"] == "3 h"


def test_the_failed_of_a_handler_are_one_click_away(log_in: Log) -> None:
    failed = stored(id="01900000-0000-7000-8000-000000000000")
    client = log_in(*VIEW)

    row = row_of(client.get(OVERVIEW), "orders.take_payment")

    shown = client.get(row.failed_url).context["cl"].result_list
    assert [str(delivery.pk) for delivery in shown] == [str(failed.pk)]


def test_handlers_about_which_there_is_nothing_to_say_are_left_out(log_in: Log) -> None:
    stored(handler="gone.handler")

    page = log_in(*VIEW).get(OVERVIEW)

    assert [row.name for row in page.context["handlers"]] == ["gone.handler"]


def test_it_warns_when_no_worker_and_no_relay_has_been_seen_lately(log_in: Log) -> None:
    long_ago = timezone.now() - timedelta(minutes=10)
    Worker.objects.create(
        host="a", pid=1, queues=["default"], relays=True, started_at=long_ago, seen_at=long_ago
    )

    text = text_of(log_in(*VIEW).get(OVERVIEW))

    assert "No worker has been seen in the last minute" in text
    assert "No relay has been seen in the last minute" in text
    assert "10 min ago" in text


def test_it_does_not_warn_when_a_worker_has_been_seen(log_in: Log) -> None:
    now = timezone.now()
    Worker.objects.create(
        host=NASTY, pid=7, queues=["default"], relays=True, started_at=now, seen_at=now
    )

    text = text_of(log_in(*VIEW).get(OVERVIEW))

    assert "has been seen in the last minute" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_an_estimate_says_so(log_in: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    found = status.overview()
    found.backlog.failed = Figure(12_345, is_estimate=True)
    found.backlog.waiting = Figure(500, is_minimum=True)
    monkeypatch.setattr(status, "overview", lambda: found)

    text = text_of(log_in(*VIEW).get(OVERVIEW))

    assert re.search(r'title="An estimate[^"]*">~12,345<', text)
    assert re.search(r'title="At least[^"]*">500\+<', text)


def test_names_are_text_and_nothing_else(log_in: Log) -> None:
    stored(handler=NASTY)

    text = text_of(log_in(*VIEW).get(OVERVIEW))

    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_the_pages_have_nothing_that_a_strict_csp_forbids(log_in: Log) -> None:
    stored()
    client = log_in(*VIEW)

    for path in (OVERVIEW, f"{GRAPH}?workflow=orders.FulfilmentState"):
        content = text_of(client.get(path)).partition('<div id="content"')[2]
        content = content.partition("<footer")[0]
        assert content
        assert not re.search(r"<style|\sstyle=|<script|\son[a-z]+=", content)


# What it costs


def fill(workflows: int) -> None:
    for i in range(workflows):
        stored(handler=f"handler.number{i}" * 5, error_class="E")
        stored(status=Status.HANDLED, handler=f"handler.number{i}" * 5)


@pytest.mark.parametrize("handlers", [0, 3, 3 * SHOWN])
def test_the_overview_takes_few_queries_and_little_space(log_in: Log, handlers: int) -> None:
    fill(handlers)
    client = log_in(*VIEW)

    with CaptureQueriesContext(connection) as captured:
        page = client.get(OVERVIEW)

    assert page.status_code == 200
    assert len(captured) <= 12, "\n".join(query["sql"][:150] for query in captured)
    assert len(page.content) <= 300_000


def test_what_is_too_much_for_the_page_is_counted(log_in: Log) -> None:
    fill(SHOWN + 2)

    page = log_in(*VIEW).get(OVERVIEW)

    assert len(page.context["handlers"]) == SHOWN
    assert "2 more are not shown" in text_of(page)


def test_the_process_takes_few_queries(log_in: Log) -> None:
    order()
    client = log_in(*VIEW)

    with CaptureQueriesContext(connection) as captured:
        client.get(f"{GRAPH}?workflow=orders.FulfilmentState")

    assert len(captured) <= 12


# Where it is linked


@pytest.mark.parametrize("path", [APP, DELIVERIES, "/admin/orders/fulfilmentstate/"])
def test_it_is_linked_from_the_index_and_the_lists(log_in: Log, path: str) -> None:
    text = text_of(log_in(*VIEW).get(path))

    assert f'href="{OVERVIEW}"' in text


def test_who_may_not_see_deliveries_is_not_led_to_it(log_in: Log) -> None:
    text = text_of(log_in("orders.view_fulfilmentstate").get("/admin/orders/fulfilmentstate/"))

    assert OVERVIEW not in text


@pytest.mark.urls("tests.own_site_urls")
def test_it_works_on_a_site_of_ones_own(log_in: Log) -> None:
    order()
    client = log_in(*VIEW)

    for path in (APP, DELIVERIES):
        assert 'href="/backoffice/django_workflows/delivery/overview/"' in text_of(
            client.get(path.replace("admin", "backoffice", 1))
        )
    page = client.get(OVERVIEW.replace("admin", "backoffice", 1))
    row = row_of(page, "orders.FulfilmentState")
    links = (row.list_url, row.graph_url, row.oldest_running_url, row.deliveries_url)
    assert all(link.startswith("/backoffice/") for link in links)
    assert all(client.get(link).status_code == 200 for link in links)


def test_the_page_of_a_process_shows_it_drawn(log_in: Log) -> None:
    page = log_in(*VIEW).get(f"{GRAPH}?workflow=orders.FulfilmentState")

    assert '<svg xmlns="http://www.w3.org/2000/svg" class="workflows-graph"' in text_of(page)
    assert "this is what is declared" in text_of(page)


def test_an_instance_leads_to_its_process_with_its_place_marked(log_in: Log) -> None:
    instance = order()
    stored(
        handler="orders.FulfilmentState",
        instance_id=instance.pk,
        step="begin",
        version=1,
        status=Status.HANDLED,
    )
    client = log_in(*VIEW)
    page = client.get(f"/admin/orders/fulfilmentstate/{instance.pk}/change/")

    [link] = re.findall(r'href="([^"]*/graph/[^"]*)"', text_of(page))
    with CaptureQueriesContext(connection) as captured:
        process = client.get(html.unescape(link))

    assert str(instance.pk) in text_of(process)
    assert "wg-here" in text_of(process)
    assert len(captured) <= 12


@pytest.mark.parametrize("pk", ["7", "01900000-0000-7000-8000-000000000000"])
def test_the_process_of_an_instance_that_is_not_there_is_not_found(log_in: Log, pk: str) -> None:
    client = log_in(*VIEW)

    assert client.get(f"{GRAPH}?workflow=orders.FulfilmentState&instance={pk}").status_code == 404


def test_a_step_of_any_name_is_drawn_harmlessly(log_in: Log, own_registry: Any) -> None:
    tally = define_workflow(TallyState)

    def step(message: Begin, state: TallyState, context: Any) -> None: ...

    step.__name__ = NASTY
    tally.started_by(Begin, once_per="key")(step)

    @handles(Begin, name="another")
    def another(message: Begin, context: HandlerContext) -> None: ...

    client = log_in("django_workflows.view_delivery", "tests.view_tallystate")

    text = text_of(client.get(f"{GRAPH}?workflow=tests.TallyState"))

    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


# Charts


def bars(*counts: tuple[int, int]) -> list[Bar]:
    start = timezone.now()
    return [Bar(start, Figure(handled), Figure(failed)) for handled, failed in counts]


def test_a_chart_has_a_text_for_each_bar_and_says_its_total() -> None:
    svg = ElementTree.fromstring(  # noqa: S314  our own
        chart(bars((3, 1), (0, 0), (10, 0)), "name", "A <title>", time_format="%H:%M")
    )

    titles = [element.text or "" for element in svg.iter("title")]
    assert titles[0] == "A <title>"
    assert [title.partition(": ")[2] for title in titles[1:]] == [
        "3 handled, 1 failed",
        "0 handled, 0 failed",
        "10 handled, 0 failed",
    ]
    assert svg.findtext("desc") == "13 handled, 1 failed"


def test_the_failed_of_a_bar_stand_on_the_handled() -> None:
    svg = ElementTree.fromstring(sparkline(bars((5, 5)), "n", "t"))  # noqa: S314  our own

    handled, failed = (path.get("d") for path in list(svg.iter("path"))[:2])
    assert (handled, failed) == ("M0 60v-28.0h10v28.0z", "M0 32.0v-28.0h10v28.0z")


def test_one_of_very_many_can_be_seen() -> None:
    svg = sparkline(bars((1_000_000, 0), (1, 0)), "n", "t")

    assert "M12 60v-2.0h10v2.0z" in svg


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, ""),
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3_725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_span_of_time_is_short(seconds: int | None, shown: str) -> None:
    span = None if seconds is None else timedelta(seconds=seconds)

    assert lasting(span) == shown
