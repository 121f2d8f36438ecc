"""The settings: one dict, DJANGO_WORKFLOWS, each key here once with its default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.dispatch import receiver


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of DJANGO_WORKFLOWS and their defaults; spans of time are timedeltas."""

    #: Failures of a handler before its delivery is failed.
    ATTEMPTS: int = 10
    #: Wait after the first failure; each further one waits BACKOFF_FACTOR times as long.
    BACKOFF: timedelta = timedelta(seconds=1)
    BACKOFF_FACTOR: float = 4.0
    BACKOFF_MAX: timedelta = timedelta(hours=1)
    #: Dead workers before the delivery that they ran is failed.
    LOSSES: int = 5
    #: How long a worker that has gone silent keeps what it runs.
    LEASE: timedelta = timedelta(seconds=30)
    #: How long one run may take before its worker lets go of it.
    RUN_LIMIT: timedelta = timedelta(minutes=10)
    #: Nothing but conflicts for so long counts as one failure.
    CONFLICT_LIMIT: timedelta = timedelta(minutes=1)
    #: An unknown message or handler name is tried again for so long (a rolling deploy).
    UNKNOWN_LIMIT: timedelta = timedelta(minutes=10)
    #: A message with if_missing="wait" waits for its instance for so long.
    WAIT_LIMIT: timedelta = timedelta(days=1)
    #: A function (error, facts) that decides what becomes of a failure: its dotted path, or itself.
    RECOVERY: Any = None
    #: How often the relay, and an idle consumer of the DatabaseBroker, looks for due deliveries.
    RELAY_EVERY: timedelta = timedelta(seconds=1)
    POLL_EVERY: timedelta = timedelta(milliseconds=500)
    #: Deliveries that the relay takes in one statement.
    RELAY_BATCH: int = 100
    #: The largest body of a message, in bytes of UTF-8.
    MAX_BODY_BYTES: int = 1024 * 1024
    #: How long ended deliveries and instances are kept; `prune_workflows` deletes older ones.
    RETENTION: timedelta = timedelta(days=90)
    #: The queue of what names no other.
    QUEUE: str = "default"


KEYS = tuple(field.name for field in fields(Settings))


@cache
def current() -> Settings:
    """The settings in force, `override_settings` included; unknown keys are for a check."""
    given = getattr(django_settings, "DJANGO_WORKFLOWS", {})
    if not isinstance(given, dict):
        return Settings()  # a check says so
    return Settings(**{key: given[key] for key in KEYS if key in given})


@receiver(setting_changed)
def read_again(*, setting: str, **_kwargs: Any) -> None:
    if setting == "DJANGO_WORKFLOWS":
        current.cache_clear()
