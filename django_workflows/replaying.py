"""Replay what failed, was ignored or was cancelled: for code, the admin and the command alike."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from uuid import UUID

from django.db import models, router, transaction

from django_workflows import registry
from django_workflows.declarations import Handler, Recipient, WorkflowDefinition
from django_workflows.errors import NotDeclared
from django_workflows.models import REPLAYABLE, Delivery

#: Deliveries of one transaction.
BATCH = 500

Deliveries = models.QuerySet[Delivery]


def _nothing(_replayed: Sequence[Delivery]) -> None: ...


def replay(
    deliveries: Deliveries,
    *,
    limit: int | None = None,
    on_batch: Callable[[Sequence[Delivery]], None] = _nothing,
) -> int:
    """Make those of the deliveries that can be replayed due now, oldest first; how many there were.

    Failed, ignored and cancelled ones can, and start with a fresh count of attempts. Each batch
    is a transaction of its own, unless the caller has one open, so an interrupted replay keeps
    what it did and can be repeated. `on_batch` is called with each batch after its transaction,
    the deliveries as they were before. The workers get them from the relay, within RELAY_EVERY.
    """
    count = 0
    found = replayable(deliveries).order_by("pk").values_list("pk", flat=True)
    page = found
    while limit is None or count < limit:
        size = BATCH if limit is None else min(BATCH, limit - count)
        ids = list(page[:size])
        if not ids:
            break
        if replayed := _replay_batch(ids):
            count += len(replayed)
            on_batch(replayed)
        page = found.filter(pk__gt=ids[-1])
    return count


def replayable(deliveries: Deliveries) -> Deliveries:
    """Those of the deliveries that can be replayed, read where they are written."""
    return deliveries.using(router.db_for_write(Delivery)).filter(status__in=REPLAYABLE)


def _replay_batch(ids: Sequence[UUID]) -> list[Delivery]:
    """Replay those of these that nobody else has replayed meanwhile, as they were before."""
    using = router.db_for_write(Delivery)
    with transaction.atomic(using=using):
        batch = Delivery.objects.using(using).filter(pk__in=ids, status__in=REPLAYABLE)
        locked = list(
            batch.select_for_update()
            .only("message_name", "handler", "status")
            .order_by("pk")  # the same order for all, so that two replays cannot deadlock
        )
        Delivery.objects.using(using).filter(pk__in=[row.pk for row in locked]).replay()
    return locked


def select(
    *,
    ids: Iterable[UUID] | None = None,
    statuses: Iterable[str] = REPLAYABLE,
    message: str | None = None,
    handler: str | None = None,
    workflow: str | None = None,
    instance: UUID | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Deliveries:
    """The deliveries that all of these fit, for `replay`; names may be aliases.

    `since` and `until` (not included) are about when they ended. Raises `NotDeclared` for the
    name of a message, handler or workflow that nothing declares.
    """
    chosen = models.Q(status__in=list(statuses))
    if ids is not None:
        chosen &= models.Q(pk__in=list(ids))
    if message is not None:
        chosen &= models.Q(message_name__in=_names_of_message(message))
    if handler is not None:
        chosen &= models.Q(handler__in=_names_of(handler, "handler", registry.current().handlers))
    if workflow is not None:
        workflows = registry.current().workflows
        chosen &= models.Q(handler__in=_names_of(workflow, "workflow", workflows))
    if instance is not None:
        chosen &= models.Q(instance_id=instance)
    if since is not None:
        chosen &= models.Q(ended_at__gte=since)
    if until is not None:
        chosen &= models.Q(ended_at__lt=until)
    return Delivery.objects.filter(chosen)


def _names_of_message(name: str) -> tuple[str, ...]:
    """The stored name and the aliases of the message of this name."""
    messages = (m for recipient in registry.current().recipients for m in recipient.messages)
    names = {
        known: message.stored_names() for message in messages for known in message.stored_names()
    }
    if name not in names:
        raise _not_declared(name, "message", names)
    return names[name]


def _names_of(name: str, kind: str, among: Sequence[Handler | WorkflowDefinition]) -> Sequence[str]:
    """The stored name and the aliases of the handler or workflow of this name."""
    recipient: Recipient | None = registry.current().recipient(name)
    if recipient is None or recipient not in among:
        raise _not_declared(name, kind, [recipient.name for recipient in among])
    return (recipient.name, *recipient.aliases)


def _not_declared(name: str, kind: str, known: Iterable[str]) -> NotDeclared:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "list_workflows shows what there is."
    return NotDeclared(f"No {kind} is named {name!r}. {remedy}")
