"""Replay what failed, was ignored or was cancelled: for code, the admin and the command alike."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

from django.db import models, router, transaction
from pydantic import ValidationError

from django_workflows import batching, registry, running
from django_workflows.batching import OnBatch
from django_workflows.declarations import Handler, Recipient, WorkflowDefinition
from django_workflows.errors import NotDeclared, UnreadableBody
from django_workflows.messages import Message, to_json
from django_workflows.models import IS_REPLAYABLE, REPLAYABLE, Delivery, Status, WorkflowState

#: Deliveries of one transaction.
BATCH = batching.BATCH

Deliveries = batching.Deliveries


def replay(
    deliveries: Deliveries,
    *,
    limit: int | None = None,
    on_batch: OnBatch = batching.nothing,
    size: int | None = None,
) -> int:
    """Make those of the deliveries that can be replayed due now, oldest first; how many there were.

    Failed, ignored and cancelled ones can, and start with a fresh count of attempts. Each batch,
    of `size`, is a transaction of its own, unless the caller has one open, so an interrupted
    replay keeps what it did and can be repeated. `on_batch` is called with each batch after its
    transaction, the deliveries as they were before. The workers get them from the relay, within
    RELAY_EVERY.
    """
    found = replayable(deliveries)
    return batching.in_batches(
        found, _replay_batch, limit=limit, on_batch=on_batch, size=size or BATCH
    )


def replayable(deliveries: Deliveries) -> Deliveries:
    """Those of the deliveries that can be replayed, read where they are written."""
    return deliveries.using(router.db_for_write(Delivery)).filter(IS_REPLAYABLE)


def can_be_replayed(delivery: Delivery) -> bool:
    """The same of one delivery that has been read."""
    dropped = delivery.undoes and delivery.status == Status.CANCELLED
    return delivery.status in REPLAYABLE and not dropped


def _replay_batch(ids: Sequence[UUID]) -> list[Delivery]:
    """Replay those of these that nobody else has replayed meanwhile, as they were before."""
    return batching.change_each(ids, IS_REPLAYABLE, lambda rows: rows.replay())


def edited(delivery: Delivery, body: str) -> str:
    """The edited body of a delivery as it would be stored.

    Raises `UnknownName`, `UnreadableBody` for one that does not fit its message, names a field
    that the message does not have and the body did not have before, and what `send` would raise.
    """
    changed = copy.copy(delivery)
    changed.body = body
    _recipient, message = running.read(changed)
    try:
        type(message).model_validate_json(body)
    except ValidationError as error:
        new = [".".join(map(str, loc)) for loc in _unknown(error) - _unknown_in(delivery, message)]
        if new:
            raise UnreadableBody(
                f"{type(message).__qualname__} has no field {', '.join(sorted(new))}. "
                f"It has {', '.join(type(message).model_fields) or 'none'}."
            ) from error
    return to_json(message)


def replay_edited(delivery_id: UUID, body: str) -> bool:
    """Replay one delivery with another body; False: it cannot be replayed, or not any more.

    The first body is kept in `original_body`. Other deliveries of the message keep theirs. Raises
    as `edited` does, and `Delivery.DoesNotExist`.
    """
    using = router.db_for_write(Delivery)
    with transaction.atomic(using=using):
        delivery = Delivery.objects.using(using).select_for_update().get(pk=delivery_id)
        if not can_be_replayed(delivery):
            return False
        stored = edited(delivery, body)
        rows = Delivery.objects.using(using).filter(pk=delivery_id)
        rows.update(body=stored, original_body=delivery.original_body or delivery.body)
        return bool(rows.replay())


def continue_compensation(instance: WorkflowState) -> int:
    """Replay the undo command at which the undoing of an instance has stopped; 0: none has.

    When it is handled, the next one leaves, or the instance ends as compensated.
    """
    return replay(stopped_at(instance))


def stopped_at(instance: WorkflowState) -> Deliveries:
    """The undo commands of the instance that have failed for good."""
    return Delivery.objects.filter(
        sender_instance_id=instance.pk, undoes=True, status=Status.FAILED
    )


def _unknown(error: ValidationError) -> set[tuple[int | str, ...]]:
    return {e["loc"] for e in error.errors(include_url=False) if e["type"] == "extra_forbidden"}


def _unknown_in(delivery: Delivery, message: Message) -> set[tuple[int | str, ...]]:
    """The fields that the message does not have, and that the body has all the same."""
    try:
        type(message).model_validate_json(delivery.body)
    except ValidationError as error:
        return _unknown(error)
    return set()


def select(
    *,
    ids: Iterable[UUID] | None = None,
    statuses: Iterable[str] = REPLAYABLE,
    message: str | None = None,
    handler: str | None = None,
    workflow: str | None = None,
    instance: UUID | None = None,
    error: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Deliveries:
    """The deliveries that all of these fit, for `replay`; names may be aliases.

    `error` is the class of the last error, as `error_class` has it, or the end of it after a dot.
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
    if error is not None:
        chosen &= models.Q(error_class=error) | models.Q(error_class__endswith=f".{error}")
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
