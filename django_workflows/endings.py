"""How a delivery can end."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django_workflows.declarations import wait
from django_workflows.errors import RetryLater, UnknownName
from django_workflows.models import WorkflowState


@dataclass(frozen=True)
class Handled:
    """Its effects and this mark have been committed together."""

    instance: WorkflowState | None = None
    started: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Ignored:
    """There was nothing to do, for this reason; committed."""

    reason: str
    instance_id: UUID | None = None


@dataclass(frozen=True)
class Parked:
    """Its instance does not exist yet; it waits under a key; committed."""

    key: str
    how_long: wait


@dataclass(frozen=True)
class Later:
    """The handler or step asked to be run again after a while."""

    error: RetryLater


@dataclass(frozen=True)
class Failed:
    """The handler or step raised."""

    error: BaseException
    conflicts: int = 0


@dataclass(frozen=True)
class Conflicted:
    """Others were always faster; the message is fine."""

    error: BaseException
    conflicts: int


@dataclass(frozen=True)
class Unknown:
    """This process does not have the message or the handler: perhaps a newer one does."""

    error: UnknownName


@dataclass(frozen=True)
class Interrupted:
    """The worker is shutting down."""


@dataclass(frozen=True)
class Lost:
    """Another worker has it, or it was cancelled; nothing was committed here."""


Ending = Handled | Ignored | Parked | Later | Failed | Conflicted | Unknown | Interrupted | Lost
