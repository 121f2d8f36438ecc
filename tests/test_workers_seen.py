"""Each worker and relay process says that it is there."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from django_workflows import workers
from django_workflows.models import Worker
from django_workflows.workers import Presence
from tests.concurrency import wait_until
from tests.processes import ROOT, Workers, environment

pytestmark = pytest.mark.django_db(transaction=True)


def long_ago(**fields: object) -> Worker:
    before = timezone.now() - timedelta(days=2)
    return Worker.objects.create(**{"host": "old", "pid": 1, "started_at": before, **fields})


def test_a_worker_process_is_seen_with_its_queues(
    rundramatiq: Callable[..., Workers],
) -> None:
    running = rundramatiq(processes=2)

    seen = wait_until(lambda: Worker.objects.count() == 2 and list(Worker.objects.all()))

    assert {worker.pid for worker in seen} == set(running.worker_pids)
    assert {worker.host for worker in seen} == {socket.gethostname()}
    assert all(worker.relays and "default" in worker.queues for worker in seen)


def test_relay_messages_is_seen_as_a_relay_without_queues(
    database_url: str, redis_url: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "manage.py", "relay_messages"],
        cwd=ROOT,
        env=environment(database_url, redis_url, {}),
        stdin=subprocess.DEVNULL,
    )
    try:
        seen = wait_until(Worker.objects.first, timeout=30)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=15)
    finally:
        process.kill()
        process.wait()

    assert (seen.pid, seen.relays, seen.queues) == (process.pid, True, [])


def test_a_process_has_one_row_that_is_written_again() -> None:
    presence = Presence(["slow", "default"], relays=False)

    presence.say()
    first = Worker.objects.get()
    presence.next_at = 0.0
    presence.say()

    again = Worker.objects.get()
    assert (again.pk, again.pid, again.queues) == (first.pk, os.getpid(), ["default", "slow"])
    assert again.started_at == first.started_at
    assert again.seen_at > first.seen_at


def test_it_is_not_written_more_often_than_needed() -> None:
    presence = Presence([], relays=True)
    presence.say()
    first = Worker.objects.get()

    presence.say()

    assert Worker.objects.get().seen_at == first.seen_at


def test_a_process_that_starts_forgets_those_of_long_ago() -> None:
    long_ago(pid=1, seen_at=timezone.now() - workers.REMEMBERED - timedelta(minutes=1))
    long_ago(pid=2, seen_at=timezone.now() - workers.REMEMBERED + timedelta(minutes=1))

    Presence([], relays=True).say()

    assert set(Worker.objects.values_list("pid", flat=True)) == {2, os.getpid()}


def test_a_database_that_refuses_does_not_stop_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    presence = Presence([], relays=True)

    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -5)  # which the column's own check refuses
        presence.say()

    assert Worker.objects.count() == 0
    assert "could not be noted" in caplog.text
