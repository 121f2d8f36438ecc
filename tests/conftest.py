"""Databases, brokers and processes for the tests; README says how the suite is run."""

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import environ
import pytest
from django.conf import settings
from django.db import connection, connections

from django_workflows.registry import Registry
from django_workflows.testing import isolated_registry
from tests.browser import browser, chromium  # noqa: F401  fixtures
from tests.processes import Workers, environment, run_manage
from tests.services import (
    Postgres,
    postgres_server,
    rabbitmq_vhost,
    redis_server,
    url_of,
    wipe_broker,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == "test_on_sqlite.py")  # last: it takes longest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("postgres") and connection.vendor != "postgresql":
        pytest.skip(f"needs PostgreSQL, and DATABASE_URL names {connection.vendor}")


@pytest.fixture
def own_registry() -> Iterator[Registry]:
    """Only what the test itself declares is declared."""
    with isolated_registry() as registry:
        yield registry


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Point Django at the server, and name a test database that no other run uses."""
    default = connections.settings["default"]
    if settings.NEEDS_PIP_POSTGRES:
        url = request.getfixturevalue("pip_postgres").url
        address = environ.Env.db_url_config(url)
        default["OPTIONS"] = {**default["OPTIONS"], **address.pop("OPTIONS", {})}
        default.update(address)
    if connection.vendor == "sqlite":
        # A file: threads and other processes cannot reach a database in memory.
        default["TEST"]["NAME"] = str(tmp_path_factory.mktemp("sqlite") / "test.sqlite3")
    elif not request.config.getoption("reuse_db"):
        default["TEST"]["NAME"] = f"test_workflows_{os.getpid()}"


@pytest.fixture(scope="session")
def pip_postgres() -> Iterator[Postgres]:
    """The PostgreSQL server that the suite runs on when DATABASE_URL is not set."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for this test alone, empty, which it may restart."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def database_url(django_db_setup: None) -> str:
    """The URL of the test database itself, for other processes."""
    return url_of(connections["default"].settings_dict)


@pytest.fixture(scope="session")
def _redis() -> Iterator[str]:
    with redis_server() as url:
        yield url


@pytest.fixture(scope="session")
def _rabbitmq() -> Iterator[str]:
    with rabbitmq_vhost() as url:
        yield url


@pytest.fixture
def redis_url(_redis: str) -> Iterator[str]:
    """An empty Redis database."""
    wipe_broker(_redis)
    yield _redis
    wipe_broker(_redis)


@pytest.fixture
def rabbitmq_url(_rabbitmq: str) -> Iterator[str]:
    """A RabbitMQ virtual host with no message in our queues."""
    wipe_broker(_rabbitmq)
    yield _rabbitmq
    wipe_broker(_rabbitmq)


@pytest.fixture(params=["db", "redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """Each broker in turn: the test runs three times."""
    if request.param == "db":
        return "db://"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def manage(
    transactional_db: None, database_url: str
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`manage("place_orders", 5)` in another process on the test database.

    Options: `broker_url`, `env`, `url` of another database, `timeout` in seconds, and
    `check=False` to get a failure back.
    """

    def run(
        *arguments: object,
        broker_url: str = "db://",
        env: dict[str, str] | None = None,
        url: str | None = None,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        env = environment(url or database_url, broker_url, env or {})
        return run_manage(*arguments, env=env, **how)

    return run


@pytest.fixture
def rundramatiq(
    transactional_db: None, database_url: str, tmp_path: Path
) -> Iterator[Callable[..., Workers]]:
    """`rundramatiq(broker_url, processes=1, threads=2)` starts workers on the test database.

    They are ready when it returns and are killed when the test ends, which shows their log if it
    failed. More options: `env`, and `url` for another database.
    """
    started: list[Workers] = []
    numbers = itertools.count(1)

    def start(
        broker_url: str = "db://",
        processes: int = 1,
        threads: int = 2,
        env: dict[str, str] | None = None,
        url: str | None = None,
    ) -> Workers:
        log = tmp_path / f"workers-{next(numbers)}.log"
        env = environment(url or database_url, broker_url, env or {})
        workers = Workers(env, log, processes, threads)
        started.append(workers)
        workers.start()
        return workers

    yield start
    for workers in started:
        workers.kill()
        print(f"{workers.log.name}:\n{workers.read_log()[-20_000:]}")  # noqa: T201
