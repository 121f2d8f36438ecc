"""What can go wrong, in the words that a user reads."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches


class WorkflowsError(Exception):
    """The base of every error that django_workflows raises."""


class DeclarationError(WorkflowsError):
    """A message, handler or workflow is declared in a way that can never work."""


class MessageError(WorkflowsError):
    """A message cannot be sent as it is."""


class WrongVerb(MessageError):
    """Commands are sent and events are published; the other verb was used."""


class NotSerialisable(MessageError):
    """A message holds a value that would not arrive as it left."""


class TooLarge(MessageError):
    """A message's body is larger than MAX_BODY_BYTES."""


class NoHandler(MessageError):
    """A command was sent that no handler and no workflow handles."""


class NobodyAsked(MessageError):
    """A reply has nowhere to go: no workflow sent what is being handled."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known name, or with all of them."""
    known = list(known)
    near = get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    if near:
        return f"Did you mean {next(k for k in known if k.lower() == near[0])}?"
    return f"There are: {', '.join(known) or 'none'}."


def require_wait(delay: object, whose: str) -> None:
    """Raise `ValueError` unless this is a time that a delivery can wait for."""
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= timedelta(days=36_500):
        raise ValueError(
            f"{whose}({delay!r}) is no wait. Give a timedelta from 0 to 100 years, such as "
            f"timedelta(seconds=30)."
        )


class RetryLater(WorkflowsError):
    """Raise it from a handler or step to be run again after `delay`; no attempt is used up."""

    def __init__(self, delay: timedelta, reason: str = "") -> None:
        require_wait(delay, "RetryLater")
        super().__init__(reason or f"To be run again in {delay}.")
        self.delay = delay


class UnreadableBody(WorkflowsError):
    """A stored body is not a valid message of its type; it is never retried."""


class UnknownName(WorkflowsError):
    """A stored delivery names a message or a handler that this process does not have."""


class NotDeclared(WorkflowsError):
    """A message, handler or workflow is asked for by a name that nothing declares."""


class ReasonMissing(WorkflowsError):
    """What is done to a delivery by hand needs a reason, for those who look at it later."""


class LookupMismatch(WorkflowsError):
    """A lookup gave a value that the field it maps to cannot hold."""


class InstanceMissing(WorkflowsError):
    """No instance matches the message, and `if_missing` says that there must be one."""


class StaleState(WorkflowsError):
    """The instance was saved by another writer since it was read; read it again."""


class LeaseLost(WorkflowsError):
    """The delivery was given to another worker, or cancelled, while it ran."""


class BrokerResting(WorkflowsError):
    """The broker has just failed and is left alone for a moment; the relay hands over later."""


class Unrecoverable(WorkflowsError):
    """Raise it, or a subclass, from a handler or step: the delivery fails without a retry."""


class InstanceRequired(InstanceMissing, Unrecoverable):
    """As `InstanceMissing`, where `if_missing="fail"` asks for no retry."""
