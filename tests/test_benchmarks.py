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


def test_pruning_is_measured_while_deliveries_are_handled(database_url: str) -> None:
    run = benchmark(database_url, "--json", "--instances", "1000", "--batch", "100", name="prune")

    assert run.returncode == 0, run.stderr  # it fails itself when a live instance is gone
    report = json.loads(run.stdout)
    assert report["filled"]["deliveries"] == 5 * report["filled"]["instances"]
    assert report["pruned"]["deliveries"] == 5 * report["pruned"]["instances"]
    assert 950 <= report["pruned"]["instances"] <= 1_000
    assert report["orders_meanwhile"] > 0


def benchmark(url: str, *options: str, name: str = "step") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
