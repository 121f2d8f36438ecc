"""Worker processes that are killed by a message, stopped in the middle of one, or race for one."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from django.db import connection

from django_workflows import publish, send
from django_workflows.models import Delivery, Status
from tests.concurrency import wait_until
from tests.deadly.declared import (
    JustRun,
    KillWorker,
    OrderPlaced,
    RunBeside,
    Stall,
    deadly_env,
    declare,
)
from tests.delivering import delivery_of, statuses_of
from tests.models import Note, ParcelState
from tests.processes import Workers, supervised

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Rundramatiq = Callable[..., Workers]


def notes() -> Counter[str]:
    return Counter(Note.objects.values_list("text", flat=True))


def all_ended() -> bool:
    return not Delivery.objects.filter(status__in=[Status.PENDING, Status.RUNNING]).exists()


def test_a_message_that_kills_its_worker_again_and_again_is_failed_and_no_other_is(
    rundramatiq: Rundramatiq, tmp_path: Path
) -> None:
    """H55."""
    declare()
    send(KillWorker(), RunBeside(), *(JustRun(text=f"innocent {n}") for n in range(3)))
    env = deadly_env(tmp_path, LEASE=timedelta(seconds=3), BACKOFF=timedelta(seconds=3), LOSSES=4)

    with supervised(rundramatiq(env=env)):
        wait_until(all_ended, timeout=120)

    killer, beside = delivery_of(KillWorker), delivery_of(RunBeside)
    assert (killer.status, killer.losses, killer.attempts) == (Status.FAILED, 4, 0)
    assert killer.reason == killer.error == "Its worker died 4 times."
    assert (beside.status, beside.attempts) == (Status.HANDLED, 0)
    assert beside.losses >= 1
    assert statuses_of(JustRun) == [Status.HANDLED] * 3
    assert {text: n for text, n in notes().items() if text != "beside"} == {
        f"innocent {n}": 1 for n in range(3)
    }


@pytest.mark.postgres
def test_a_process_that_was_stopped_until_its_lease_ran_out_commits_nothing(
    rundramatiq: Rundramatiq, tmp_path: Path
) -> None:
    """H56. On SQLite nobody can write while the stopped process is in its transaction."""
    declare()
    send(Stall())
    env = deadly_env(tmp_path, LEASE=timedelta(seconds=2))
    first = rundramatiq(env=env, threads=1)
    mark = wait_until(lambda: (tmp_path / "stalled").exists() and tmp_path / "stalled")
    stopped = int(wait_until(mark.read_text))

    os.kill(stopped, signal.SIGSTOP)
    try:
        second = rundramatiq(env=env, threads=1)
        wait_until(lambda: delivery_of(Stall).status == Status.HANDLED, timeout=60)
        (tmp_path / "go").touch()
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: "is handled by now: another worker has it" in first.read_log(), timeout=60)
    wait_until(all_ended, timeout=60)

    delivery = delivery_of(Stall)
    assert (delivery.status, delivery.claims, delivery.losses) == (Status.HANDLED, 2, 1)
    assert notes() == {"stalled": 1, "sent": 1}
    assert statuses_of(JustRun) == [Status.HANDLED]
    assert second.running


def test_two_starts_at_once_with_once_per_from_two_processes_make_one_instance(
    rundramatiq: Rundramatiq, tmp_path: Path
) -> None:
    """D36, raced from two workers; on Postgres both are inside the step at the same moment."""
    declare()
    env = {**deadly_env(tmp_path), "dramatiq_queue_prefetch": "1"}
    workers = rundramatiq(env=env, processes=2, threads=1)
    keys = [uuid4() for _ in range(5)]

    for key in keys:
        publish(OrderPlaced(order_id=key), OrderPlaced(order_id=key))
        wait_until(all_ended, timeout=60)

    assert sorted(ParcelState.objects.values_list("order_id", flat=True)) == sorted(keys)
    assert notes() == {f"started {key}": 1 for key in keys}
    assert Counter(statuses_of(OrderPlaced)) == {"handled": 5, "ignored": 5}
    if connection.vendor == "postgresql":
        marks = {f"{key}-{pid}" for key in keys for pid in workers.worker_pids}
        assert {mark.name for mark in tmp_path.iterdir()} >= marks
