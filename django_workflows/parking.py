"""Messages that come before their instance: parked under its key, let go when it is created.

Of two transactions, one that parks a message and one that creates its instance, each must see
what the other does. A lock on the key, held to the end of the transaction, puts one after the
other; on SQLite there is one writer anyway.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from django_workflows import clock, outbox
from django_workflows.declarations import WorkflowDefinition, wait
from django_workflows.models import Delivery, Status, WorkflowState


def key_for(definition: WorkflowDefinition, field_name: str, value: Any) -> str:
    """What stands for an instance that does not exist yet: of this workflow, with this value."""
    if isinstance(value, Decimal):
        value = format(value.normalize(), "f")
    if isinstance(value, datetime):
        value = value.astimezone(UTC).isoformat()
    text = f"{definition.name}\n{field_name}\n{value}"
    return hashlib.sha256(text.encode()).hexdigest()


def lock(cursor: CursorWrapper, keys: Iterable[str]) -> None:
    """Be the only one, until the end of this transaction, to park under or create these keys."""
    if cursor.db.vendor == "postgresql":
        for key in sorted(keys):  # the same order for all, so that nobody deadlocks
            number = int.from_bytes(bytes.fromhex(key[:16]), signed=True)
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number])


def park(delivery: Delivery, key: str, how_long: wait) -> bool:
    """Let a running delivery wait under the key. False: it is no longer ours."""
    until = clock.read(outbox.database()) + how_long.limit
    return bool(
        outbox.deliveries()
        .filter(pk=delivery.pk, status=Status.RUNNING, claims=delivery.claims)
        .update(
            status=Status.PENDING,
            reason="It waits for its instance to be created.",
            waits_for=key,
            due_at=until,
            relay_at=until,
        )
    )


def keys_of(
    definition: WorkflowDefinition, instance: WorkflowState, changed: Sequence[Any] | None
) -> list[str]:
    """The keys under which messages may wait for this instance, of which these fields are new."""
    fields = {step.maps_to for step in definition.steps if step.waits and step.maps_to}
    if changed is not None:
        fields &= {field.name for field in changed}
    values = {name: _value(instance, name) for name in fields}
    return [
        key_for(definition, name, value)
        for name, value in values.items()
        if value not in (None, "")
    ]


def let_go(keys: Sequence[str]) -> None:
    """Make what waits under these keys due, in the transaction that creates the instance."""
    if not keys:
        return
    now = clock.read(outbox.database())
    waiting = outbox.deliveries().filter(waits_for__in=keys, status=Status.PENDING)
    by_queue: dict[str, list[UUID]] = defaultdict(list)
    for pk, queue in waiting.values_list("pk", "queue"):
        by_queue[queue].append(pk)
    waiting.filter(pk__in=[pk for ids in by_queue.values() for pk in ids]).update(
        waits_for="", due_at=now, relay_at=now + outbox.second_look()
    )
    outbox.hand_over_on_commit(by_queue)


def _value(instance: WorkflowState, field_name: str) -> Any:
    field: Any = instance._meta.get_field(field_name)
    value = getattr(instance, field.attname)
    return field.to_python(value) if not field.is_relation else value
