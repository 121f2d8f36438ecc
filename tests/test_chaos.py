"""No order is lost or doubled, whatever dies: the harness is `tests/chaos.py`, also for hands."""

import os
from pathlib import Path

import pytest

from tests import chaos
from tests.services import Postgres

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(420)]

ORDERS = int(os.environ.get("CHAOS_ORDERS", "500"))


def test_every_order_ends_once_while_everything_dies(
    own_postgres: Postgres, broker_url: str, tmp_path: Path
) -> None:
    story = chaos.run(own_postgres, broker_url, tmp_path, orders=ORDERS)

    assert not story.wrong, f"\n{story}"


def test_every_order_ends_once_when_declared_with_functions(
    own_postgres: Postgres, tmp_path: Path
) -> None:
    story = chaos.run(own_postgres, "db://", tmp_path, orders=ORDERS, style="functions")

    assert not story.wrong, f"\n{story}"
