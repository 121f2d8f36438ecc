"""A worker process that is no longer whole ends itself, so that it is started again."""

from collections.abc import Callable

import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from tests.concurrency import wait_until
from tests.processes import Workers, is_alive
from tests.services import redis_server


def test_workers_whose_master_was_killed_end_themselves(
    rundramatiq: Callable[..., Workers],
) -> None:
    workers = rundramatiq(processes=2)
    pids = workers.worker_pids

    workers.kill_master()

    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)), timeout=30)


@pytest.mark.timeout(180)
def test_a_worker_whose_consumer_thread_died_ends_itself(
    rundramatiq: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)  # a server that others use is not to be paused
    with redis_server() as url, redis.Redis.from_url(url) as client:
        workers = rundramatiq(f"{url}?socket_timeout=0.5")
        # The consumer that holds a delayed message, of a project's own actor say, does not
        # survive a timeout of its Redis.
        delay_a_message(url)
        wait_until(lambda: not client.llen("dramatiq:default.DQ"))

        client.execute_command("CLIENT", "PAUSE", 60_000)

        wait_until(lambda: not workers.running, timeout=90)
    assert "of its threads have died" in workers.read_log()


def delay_a_message(url: str) -> None:
    broker = RedisBroker(url=url)
    broker.declare_queue("default")
    options = {"queue_name": "default", "actor_name": "their_own", "args": (), "kwargs": {}}
    broker.enqueue(Message(**options, options={}), delay=600_000)
    broker.close()
