"""The benchmark runs, and compares like with like."""

import json
import os
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def test_the_engine_and_the_bare_loop_fulfil_the_same_orders(database_url: str) -> None:
    run = benchmark(database_url, "--json", "--seconds", "0", "--orders", "2")

    assert run.returncode == 0, run.stderr  # it fails itself when an order is left
    report = json.loads(run.stdout)
    assert report["ratio"]["median"] > 1
    assert report["deliveries"] == report["rounds"] * 2 * len(report["statements"])
    assert max(map(len, report["statements"])) == 6  # a plain step, and the timeout it cancels
    assert report["commits_per_delivery"] == 2


def test_on_sqlite_it_says_what_it_needs() -> None:
    run = benchmark("sqlite:///unused.sqlite3", "--json")

    assert run.returncode == 1
    assert run.stderr.startswith("This benchmark needs Postgres")
    assert run.stdout == ""


def benchmark(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    command = [sys.executable, "-m", "benchmarks.step", *options]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
