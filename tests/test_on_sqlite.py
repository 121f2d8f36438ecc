"""The whole suite once more on SQLite, so that one command tests both databases."""

import os
import subprocess
import sys

import pytest
from django.db import connection

from tests.processes import ROOT

if connection.vendor == "sqlite":
    pytest.skip("this is the run on SQLite", allow_module_level=True)


@pytest.mark.timeout(3600)
def test_the_suite_passes_on_sqlite(capfd: pytest.CaptureFixture[str]) -> None:
    # Only the kind of database counts: the run makes a file of its own.
    env = {**os.environ, "DATABASE_URL": "sqlite:///unused.sqlite3"}

    with capfd.disabled():
        print("\n\nThe suite on SQLite:", flush=True)  # noqa: T201
        run = subprocess.run([sys.executable, "-m", "pytest"], cwd=ROOT, env=env, check=False)

    assert run.returncode == 0
