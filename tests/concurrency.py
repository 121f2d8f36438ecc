"""Waiting for a condition, and calling several things at the same moment."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from django.db import connections

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = 10, every: float = 0.02) -> T:
    """The first true value of the condition; after `timeout` seconds the test fails."""
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not true within {timeout} s: {condition!r} last gave {value!r}")
        time.sleep(every)


def at_once(*calls: Callable[[], Any], timeout: float = 60) -> list[Any]:
    """Call all at the same moment, each in a thread with a database connection of its own.

    Gives their results in order; for a call that raised, the exception.
    """
    start = threading.Barrier(len(calls))

    def call(target: Callable[[], Any]) -> Any:
        try:
            start.wait(timeout)
            return target()
        except Exception as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls, timeout=timeout))
