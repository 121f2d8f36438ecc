"""What becomes of a delivery that did not work out: retry when, or give up."""

from __future__ import annotations

import json
import logging
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from uuid import UUID

from django.db import DatabaseError, InterfaceError, OperationalError
from django.utils.module_loading import import_string

from django_workflows import clock, conf
from django_workflows.declarations import Errors, Recovery
from django_workflows.errors import (
    LookupMismatch,
    StaleState,
    UnreadableBody,
    Unrecoverable,
    require_wait,
)
from django_workflows.models import Delivery
from django_workflows.stale import close_stale_connections

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Errors that no retry can mend.
HOPELESS: Errors = (Unrecoverable, UnreadableBody, LookupMismatch)

#: Conflicts are retried in place so often, then the delivery is released for a moment.
TRIES_IN_PLACE = 5

#: Seconds before each try in place while the database cannot be reached: a restart is waited out.
OUTAGE_PAUSES = (0.1, 0.5, 2.0, 5.0)

MAX_ERROR = 2_000
MAX_ERROR_CLASS = 200
MAX_TRACEBACK = 20_000


@dataclass(frozen=True)
class RetryAfter:
    """What a policy answers: run it again after this wait."""

    delay: timedelta

    def __post_init__(self) -> None:
        require_wait(self.delay, "RetryAfter")


@dataclass(frozen=True)
class GiveUp:
    """What a policy answers: the delivery has failed for good."""


@dataclass(frozen=True)
class FailureFacts:
    """What a policy is told about a delivery whose handler or step has raised."""

    message_name: str
    handler: str
    delivery_id: UUID
    #: Failures so far, this one included.
    attempts: int


#: `RECOVERY`: a function of the error and the facts; None leaves it to the settings.
Policy = Callable[[BaseException, FailureFacts], RetryAfter | GiveUp | None]


def retry_after(delivery: Delivery, error: BaseException, declared: Recovery) -> timedelta | None:
    """How long to wait before the next attempt; None to give up.

    What is declared for the handler, step or workflow counts first, then the project's policy,
    then the settings. Whatever is wrong with those, the failure must be recorded.
    """
    try:
        return decide(delivery, error, declared)
    except Exception:
        logger.exception("What is declared, %r, cannot be followed; the settings decide.", declared)
        failures = delivery.attempts + 1
        return backoff(failures) if failures < conf.current().ATTEMPTS else None


def decide(delivery: Delivery, error: BaseException, declared: Recovery) -> timedelta | None:
    """What `retry_after` answers, if nothing raises."""
    failures = delivery.attempts + 1
    if isinstance(error, HOPELESS + declared.unrecoverable):
        return None
    if declared.attempts is not None and failures >= declared.attempts:
        return None
    if declared.attempts is None and declared.backoff is None:
        facts = FailureFacts(delivery.message_name, delivery.handler, delivery.id, failures)
        match ask_project(error, facts):
            case RetryAfter(delay):
                return delay
            case GiveUp():
                return None
    if declared.attempts is None and failures >= conf.current().ATTEMPTS:
        return None
    if callable(declared.backoff):
        return ask_declared(declared.backoff, failures)
    return declared.backoff if declared.backoff is not None else backoff(failures)


def ask_project(error: BaseException, facts: FailureFacts) -> RetryAfter | GiveUp | None:
    """What the function that RECOVERY names answers; None, if it raises: nothing may be lost."""
    named = conf.current().RECOVERY
    try:
        policy: Policy | None = import_string(named) if isinstance(named, str) else named
        return policy(error, facts) if policy else None
    except Exception:
        logger.exception("The policy %r raised; the settings decide instead.", named)
        return None


def ask_declared(function: Callable[[int], timedelta], failures: int) -> timedelta:
    """The wait that a declared function gives; that of the settings, if it raises."""
    try:
        wait: object = function(failures)
        if not isinstance(wait, timedelta):
            raise TypeError(f"{wait!r} is not a timedelta.")
        require_wait(wait, "backoff")
    except Exception:
        logger.exception("The backoff %r raised; the settings decide instead.", function)
        return backoff(failures)
    return wait


def backoff(failures: int) -> timedelta:
    """The wait after so many failures: growing, jittered by a half, at most BACKOFF_MAX."""
    settings = conf.current()
    exponent = min(failures - 1, 64)
    wait = settings.BACKOFF.total_seconds() * settings.BACKOFF_FACTOR**exponent
    wait = min(wait, settings.BACKOFF_MAX.total_seconds())
    return timedelta(seconds=wait * random.uniform(0.5, 1))  # noqa: S311


def wait_out(error: BaseException, conflicts: int) -> None:
    """Wait before trying again in place: milliseconds for another writer, seconds for an outage."""
    if is_outage(error):
        time.sleep(OUTAGE_PAUSES[min(conflicts, len(OUTAGE_PAUSES)) - 1])
    else:
        time.sleep(random.uniform(0.001, 0.004) * 2**conflicts)  # noqa: S311
    close_stale_connections()


def persistently(act: Callable[[int], T]) -> T:
    """Do it again in place while nothing but a conflict stops it; `act` gets how many there were.

    Raises what stops it, and the last conflict after TRIES_IN_PLACE.
    """
    conflicts = 0
    while True:
        try:
            return act(conflicts)
        except Exception as error:
            conflicts += 1
            if not is_conflict(error) or conflicts == TRIES_IN_PLACE:
                raise
            wait_out(error, conflicts)


def pause_after_conflicts() -> timedelta:
    """How long a delivery is released for when running in place did not help."""
    return timedelta(seconds=random.uniform(0.05, 0.3))  # noqa: S311


def held_up_for(delivery: Delivery) -> timedelta:
    """For how long only conflicts or an unknown name have stopped it; by the database's clock."""
    if delivery.held_up_since is None or delivery.started_at is None:
        return timedelta(0)
    return delivery.started_at - delivery.held_up_since


def is_conflict(error: BaseException) -> bool:
    """Whether the message was fine and the moment was not: another writer, a lost connection."""
    if isinstance(error, StaleState):
        return True
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    state = getattr(error.__cause__, "sqlstate", None)
    return state in _CONFLICTS or "is locked" in str(error) or is_outage(error)


def is_outage(error: BaseException) -> bool:
    """Whether the database cannot be reached, or has gone away."""
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    cause = error.__cause__
    state = getattr(cause, "sqlstate", None)
    if state is not None:
        return state in _OUTAGES or state.startswith(_CONNECTION_EXCEPTION)
    if hasattr(cause, "sqlstate"):  # of psycopg itself: the server's errors all have a code
        return isinstance(error, OperationalError)
    return "connection already closed" in str(error)  # what Django says of it


#: Serialization failure, deadlock, lock not available.
_CONFLICTS = frozenset({"40001", "40P01", "55P03"})
#: The server shuts down, has crashed, or is starting.
_OUTAGES = frozenset({"57P01", "57P02", "57P03"})
_CONNECTION_EXCEPTION = "08"


@dataclass(frozen=True)
class Record:
    """An error as it is stored: fit for the database, and no longer than it must be."""

    error: str
    error_class: str
    traceback: str
    failure: str


def record_of(error: BaseException, attempt: int) -> Record:
    """The error and its traceback, without what the database refuses, capped."""
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    try:
        said = str(error)
    except Exception:  # a broken __str__ must not hide the failure
        said = "(its text cannot be read)"
    text = storable(f"{name}: {said}" if said else name)[:MAX_ERROR]
    try:
        story = storable("".join(traceback.format_exception(error)))
    except Exception:  # the same, deeper in the chain
        story = "".join(traceback.format_tb(error.__traceback__))
    failure = {"at": clock.local().isoformat(), "attempt": attempt, "error": text}
    kind = storable(name)[:MAX_ERROR_CLASS]
    return Record(text, kind, story[-MAX_TRACEBACK:], json.dumps(failure))


def storable(text: str) -> str:
    """The text without NUL and lone surrogates, which Postgres refuses."""
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()
