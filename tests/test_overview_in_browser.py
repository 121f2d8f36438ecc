"""The overview, what failed alike and a process drawn, in a real browser with a strict CSP."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_workflows.models import Delivery, Status, Worker
from testproject.orders.placing import place_order
from tests.browser import Browser, browser, chromium  # noqa: F401  fixtures
from tests.delivering import deliver_due
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERIES = "/admin/django_workflows/delivery/"
SCHEMES = ("light", "dark")


@pytest.fixture(autouse=True)
def _no_chance(settings: Any) -> None:
    settings.PAYMENT_DECLINE_RATE = settings.PAYMENT_FLAKY_RATE = 0
    settings.SHIPMENT_FAIL_RATE = 0


def a_bad_night() -> None:
    now = timezone.now()
    Worker.objects.create(
        host="worker-1", pid=7, queues=["default"], relays=True, started_at=now, seen_at=now
    )
    for minutes in range(1, 20):
        for _ in range(minutes % 5 + 1):
            stored(status=Status.HANDLED, ended_at=now - timedelta(minutes=minutes))
    for _ in range(3):
        error = "ValueError: <b>out</b> of ink"
        stored(error_class="ValueError", error=error, handler="orders.ship_order")
    stored(error_class="KeyError")
    place_order()
    deliver_due()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_from_the_overview_to_a_group_and_its_replay(
    browser: Browser,  # noqa: F811
    scheme: str,
    tmp_path: Path,
) -> None:
    a_bad_night()
    browser.prefer(scheme)

    browser.open(f"{DELIVERIES}overview/")
    browser.save_screenshot(tmp_path / "overview.png")
    assert "orders.FulfilmentState" in browser.text
    assert browser.count("svg.workflows-chart") > 2
    assert not browser.is_wider_than_the_window()
    browser.click(".workflows-cards a")
    browser.save_screenshot(tmp_path / "failed.png")
    assert "<b>out</b> of ink" in browser.text
    browser.click("tbody tr:first-child a.button")
    browser.save_screenshot(tmp_path / "confirm.png")
    assert "3 deliveries" in browser.text
    browser.click("#content-main input[type=submit]")

    assert "3 deliveries will be handled again." in browser.text
    assert browser.path == f"{DELIVERIES}failed/"
    assert Delivery.objects.filter(status=Status.FAILED).count() == 1
    assert browser.problems() == []


OVERLAPS = """
const boxes = [...document.querySelectorAll('.wg-box > rect:first-of-type')].map(r => r.getBBox());
return boxes.filter((a, i) => boxes.some((b, j) => i < j
  && a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height
)).length;
"""
SPILLS = """
return [...document.querySelectorAll('.wg-box')].filter(g => {
  const box = g.querySelector('rect').getBBox();
  return [...g.querySelectorAll('text')].some(t => {
    const text = t.getBBox();
    return text.x < box.x || text.x + text.width > box.x + box.width
      || text.y < box.y || text.y + text.height > box.y + box.height;
  });
}).map(g => g.textContent);
"""
COLOURS = """
const of = (css, name) => getComputedStyle(document.querySelector(css))[name];
return [of('.wg-title', 'fill'), of('.wg-step rect', 'fill'), of('.wg-line path', 'stroke')];
"""


def test_the_texts_of_a_process_are_in_their_boxes_and_the_boxes_apart(
    browser: Browser,  # noqa: F811
) -> None:
    a_bad_night()

    browser.open(f"{DELIVERIES}graph/?workflow=orders.FulfilmentState")

    assert browser.count(".wg-box") > 10
    assert browser.driver.execute_script(OVERLAPS) == 0
    assert browser.driver.execute_script(SPILLS) == []
    assert browser.problems() == []


def test_a_process_has_the_colours_of_the_viewers_scheme(
    browser: Browser,  # noqa: F811
) -> None:
    browser.open(f"{DELIVERIES}graph/?workflow=orders.FulfilmentState")

    colours = {}
    for scheme in SCHEMES:
        browser.prefer(scheme)
        colours[scheme] = browser.driver.execute_script(COLOURS)

    assert all(a != b for a, b in zip(colours["light"], colours["dark"], strict=True))
    assert all(colours["light"])
