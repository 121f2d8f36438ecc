"""The admin's pages on a million deliveries, next to the same pages on an almost empty database.

`python -m benchmarks.pages` fills a database (benchmarks.fill), measures and drops it. Each page is
asked for on all of three in turns, in one process; what counts are the ratios of the medians. The
empty database has one instance with a failed delivery, so that every page exists. The small one
has 100, so that most lists are as long: what they take beyond it is what the size of the tables
costs, and what the small one takes beyond the empty one is the price of showing rows. Exits with 1
when a page takes more than 12 queries or 300 KB, or, with --ratio, longer than so many times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import psycopg
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from benchmarks.database import address
from benchmarks.fill import INSTANCES, fill, use
from django_workflows.models import Delivery, Status
from testproject.orders.models import FulfilmentState

NAME = "benchmark_pages"
#: Instances that fill one page of any list.
SMALL = 100
QUERIES, KILOBYTES = 12, 300
DELIVERIES = "/admin/django_workflows/delivery/"
STATES = "/admin/orders/fulfilmentstate/"
FULFILMENT = "orders.FulfilmentState"


@dataclass
class Page:
    """One page, measured on both databases."""

    name: str
    queries: int = 0
    kilobytes: float = 0.0
    ms: float = 0.0
    ms_small: float = 0.0
    ms_empty: float = 0.0
    #: How many times as long as on the small, and on the empty database.
    to_small: float = 0.0
    ratio: float = 0.0
    #: Milliseconds of each request, by database.
    times: dict[str, list[float]] = field(
        default_factory=lambda: {"full": [], "small": [], "empty": []}
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--instances", type=int, default=INSTANCES, help="of five deliveries each")
    parser.add_argument("--name", default=NAME, help=f"of the database ({NAME})")
    parser.add_argument("--keep", action="store_true", help="do not drop it; use one that is there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5, help="of each page in each round")
    parser.add_argument("--ratio", type=float, help="fail when a page takes longer than this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = {"full": options.instances, "small": SMALL, "empty": 1}
    names = {kind: f"{options.name}_{kind}" for kind in sizes}
    for kind, instances in sizes.items():
        prepare(names[kind], instances, keep=options.keep)
    try:
        pages = measure(names, options.rounds, options.requests)
    finally:
        if not options.keep:
            for name in names.values():
                use(name, make=False)
    report(pages, as_json=options.json)
    bad = [page.name for page in pages if is_bad(page, options.ratio)]
    if bad:
        sys.exit(f"Too much: {', '.join(bad)}")


def prepare(name: str, instances: int, *, keep: bool) -> None:
    """Fill the database, unless it is to be kept and is there."""
    if keep and exists(name):
        return
    use(name)
    filled = fill(instances)
    if instances == 1:  # so that there is a group to show, too
        newest = Delivery.objects.latest("pk")
        Delivery.objects.filter(pk=newest.pk).update(
            status=Status.FAILED,
            relay_at=None,
            ended_at=newest.created_at,
            error_class="ValueError",
        )
    print(f"{name}: {filled.instances:,} instances, {filled.deliveries:,} deliveries", flush=True)


def exists(name: str) -> bool:
    with psycopg.connect(**{**address(), "dbname": "postgres"}) as server:
        found = server.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name])
        return found.fetchone() is not None


@contextmanager
def logged_in(name: str) -> Iterator[Client]:
    """Somebody who may see everything, on this database."""
    connections.close_all()
    connection.settings_dict |= {"NAME": name, "CONN_MAX_AGE": None}
    call_command("migrate", verbosity=0)
    user, _made = User.objects.get_or_create(
        username="benchmark", defaults={"is_staff": True, "is_superuser": True}
    )
    client = Client()
    client.force_login(user)
    yield client


def paths(kind: str) -> dict[str, str]:
    """The pages; those of one row are of one that is on this database."""
    late = "?p=50" if kind == "full" else ""  # there is only one on the other
    failed = Delivery.objects.filter(status=Status.FAILED).order_by("-pk")[:1].get()
    state = FulfilmentState.objects.order_by("-pk")[:1].get()
    group = f"handler={failed.handler}&error_class={failed.error_class}"
    return {
        "deliveries": DELIVERIES,
        "deliveries, page 50": f"{DELIVERIES}{late}",
        "deliveries, failed": f"{DELIVERIES}?status__exact=failed",
        "deliveries, pending": f"{DELIVERIES}?status__exact=pending",
        "deliveries, running": f"{DELIVERIES}?status__exact=running",
        "deliveries, handled": f"{DELIVERIES}?status__exact=handled",
        "deliveries, ignored": f"{DELIVERIES}?status__exact=ignored",
        "deliveries of a handler": f"{DELIVERIES}?handler=orders.take_payment",
        "deliveries of a message": f"{DELIVERIES}?message=orders.PickStock",
        "deliveries, a group": f"{DELIVERIES}?status__exact=failed&created=any&{group}",
        "deliveries, by an id": f"{DELIVERIES}?q={failed.correlation_id}",
        "one delivery": f"{DELIVERIES}{failed.pk}/change/",
        "instances": STATES,
        "instances, running": f"{STATES}?lifecycle__exact=running",
        "instances, failed": f"{STATES}?lifecycle__exact=failed",
        "instances, by a key": f"{STATES}?q={state.order_id}",
        "one instance": f"{STATES}{state.pk}/change/",
        "overview": f"{DELIVERIES}overview/",
        "failed groups": f"{DELIVERIES}failed/",
        "replay a group": f"{DELIVERIES}failed/replay/?{group}",
        "process": f"{DELIVERIES}graph/?workflow={FULFILMENT}",
        "process, an instance": f"{DELIVERIES}graph/?workflow={FULFILMENT}&instance={state.pk}",
    }


def measure(databases: dict[str, str], rounds: int, requests: int) -> list[Page]:
    """Each page on each database, in turns."""
    pages: dict[str, Page] = {}
    for turn in range(rounds):
        order = list(databases.items())
        for kind, name in order[turn % 3 :] + order[: turn % 3]:
            with logged_in(name) as client:
                for title, path in paths(kind).items():
                    page = pages.setdefault(title, Page(title))
                    ask(client, path)  # once, to have everything at hand
                    page.times[kind] += [ask(client, path) for _ in range(requests)]
                    if kind == "full" and not page.queries:
                        count(client, path, page)
    for page in pages.values():
        medians = {kind: statistics.median(times) for kind, times in page.times.items()}
        page.ms, page.ms_small, page.ms_empty = (medians[k] for k in ("full", "small", "empty"))
        page.to_small, page.ratio = page.ms / page.ms_small, page.ms / page.ms_empty
    return list(pages.values())


def ask(client: Client, path: str) -> float:
    """How many milliseconds the page takes."""
    began = time.perf_counter()
    response = client.get(path)
    took = time.perf_counter() - began
    assert response.status_code == 200, (path, response.status_code)
    return took * 1000


def count(client: Client, path: str, page: Page) -> None:
    with CaptureQueriesContext(connection) as captured:
        response = client.get(path)
    page.queries = len(captured)
    page.kilobytes = len(response.content) / 1000


def is_bad(page: Page, ratio: float | None) -> bool:
    return (
        page.queries > QUERIES
        or page.kilobytes > KILOBYTES
        or (ratio is not None and page.ratio > ratio)
    )


def report(pages: list[Page], *, as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [asdict(page) for page in pages]
        print(json.dumps(rows))
        return
    print(f"{'':<26}{'':>8}{'':>6}{'milliseconds on':>24}{'times as long as on':>22}")
    print(
        f"{'page':<26}{'queries':>8}{'KB':>6}{'full':>8}{'small':>8}{'empty':>8}"
        f"{'small':>12}{'empty':>10}"
    )
    for page in pages:
        print(
            f"{page.name:<26}{page.queries:>8}{page.kilobytes:>6.0f}{page.ms:>8.1f}"
            f"{page.ms_small:>8.1f}{page.ms_empty:>8.1f}{page.to_small:>12.2f}{page.ratio:>10.2f}"
        )


if __name__ == "__main__":
    main()
