"""Plain handlers: one function for one message, without state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, Unpack

from django_workflows import registry
from django_workflows.context import HandlerContext
from django_workflows.declarations import (
    Handler,
    Recovery,
    RecoveryOptions,
    require_parentheses,
)
from django_workflows.messages import Message

M = TypeVar("M", bound=Message)
HandlerFunction = Callable[[M, HandlerContext], None]


def handles(
    message: type[M],
    *,
    name: str | None = None,
    aliases: Iterable[str] = (),
    atomic: bool = True,
    queue: str | None = None,
    **recovery: Unpack[RecoveryOptions],
) -> Callable[[HandlerFunction[M]], HandlerFunction[M]]:
    """Let the decorated function handle this message; it is called with `(message, context)`.

    It runs in a transaction of its own, together with what it sends and the mark that it was
    handled: exactly once in the database's eyes. With `atomic=False` no transaction is open
    while it runs: it is at least once, for slow outside services, with `context.delivery_id`
    as their idempotency key; what it sends is stored together with the finish.

    `name` is stored with every delivery (default: app label and function name) and `aliases`
    are its former names. `queue` keeps slow work apart. `attempts`, `backoff` and
    `unrecoverable` say how its failures are dealt with.
    """

    require_parentheses(message, "@handles")
    declared = Recovery.of(recovery, "@handles", "name", "aliases", "atomic", "queue")

    def register(function: HandlerFunction[M]) -> HandlerFunction[M]:
        registry.current().add(
            Handler(
                message=message,
                function=function,
                given_name=name,
                aliases=tuple(aliases),
                atomic=atomic,
                given_queue=queue,
                recovery=declared,
            )
        )
        return function

    return register
