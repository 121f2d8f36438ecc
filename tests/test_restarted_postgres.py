"""PostgreSQL is restarted under running workers, which carry on by themselves."""

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from tests.processes import Workers, is_alive, workflow_settings
from tests.services import Postgres

pytestmark = pytest.mark.postgres

#: Every second attempt fails, and is tried again soon: the relay has to work too.
FLAKY = {
    "PAYMENT_FLAKY_RATE": "0.5",
    "PAYMENT_DECLINE_RATE": "0",
    **workflow_settings(ATTEMPTS=30, BACKOFF_FACTOR=1.0),
}


def test_workers_carry_on_when_postgres_has_been_restarted(
    own_postgres: Postgres,
    broker_url: str,
    rundramatiq: Callable[..., Workers],
    manage: Callable[..., CompletedProcess[str]],
) -> None:
    where = {"url": own_postgres.url, "env": FLAKY}
    placing = ("place_orders", 20, "--wait", "--json", "--timeout", 60)
    manage("migrate", **where)
    workers = rundramatiq(broker_url, processes=2, threads=4, **where)
    manage(*placing, broker_url=broker_url, **where)  # all threads have a connection now
    before = workers.pid, workers.worker_pids

    own_postgres.restart()

    summary = json.loads(manage(*placing, broker_url=broker_url, **where).stdout)
    assert summary["completed"] == 20
    assert summary["retries"] > 0
    assert workers.running
    assert (workers.pid, workers.worker_pids) == before
    assert all(map(is_alive, workers.worker_pids))
