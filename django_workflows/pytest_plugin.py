"""pytest fixtures: `workflows`, the engine in the test's own transaction, and `isolated_registry`.

pytest loads this before Django is set up, so the rest is imported when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_workflows.registry import Registry


@pytest.fixture
def workflows(db: None) -> Iterator[ModuleType]:
    """`django_workflows.testing`, with a clock that is put back and without a broker."""
    from django_workflows import testing

    with testing.moved_clock():
        yield testing


@pytest.fixture
def isolated_registry() -> Iterator[Registry | Any]:
    """An empty registry while the test runs; what the test declares, only it knows."""
    from django_workflows import registry

    with registry.isolated() as empty:
        yield empty
