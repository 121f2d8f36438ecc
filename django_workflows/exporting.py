"""One instance with all that has happened to it, as JSON: for a bug report."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Q

from django_workflows import masking, outbox
from django_workflows.declarations import WorkflowDefinition
from django_workflows.instances import MANAGED
from django_workflows.models import Delivery, WorkflowState

#: Deliveries in an export; of more, the oldest and the newest, half of each.
MOST = 10_000


def export(
    definition: WorkflowDefinition, instance: WorkflowState, *, unmasked: bool = False
) -> dict[str, Any]:
    """The instance, its fields, and the deliveries to it and of it, oldest first.

    What is sensitive is masked, unless `unmasked`: in bodies, changes and fields by where it
    stands, and its values wherever they stand in the texts, errors and tracebacks of all of it.
    """
    deliveries, in_all = _deliveries_of(definition, instance)
    secrets: set[str] = set()
    if not unmasked:
        secrets |= masking.secrets_of_instance(instance)
        for delivery in deliveries:
            secrets |= masking.secrets_of(delivery)
    return {
        "exported_at": datetime.now(UTC).isoformat(),
        "masked": not unmasked,
        "workflow": definition.name,
        "state": type(instance)._meta.label,
        "instance": _instance(instance, unmasked, secrets),
        "deliveries_in_all": in_all,
        "deliveries": [_delivery(delivery, instance, unmasked, secrets) for delivery in deliveries],
    }


def as_text(exported: dict[str, Any]) -> str:
    """The export as indented JSON."""
    return json.dumps(exported, indent=2, ensure_ascii=False, cls=_Encoder)


def _deliveries_of(
    definition: WorkflowDefinition, instance: WorkflowState
) -> tuple[list[Delivery], int]:
    """Those to the instance, and those that it sent; how many there are."""
    to_it = Q(instance_id=instance.pk, handler__in=definition.names)
    of_it = Q(sender_instance_id=instance.pk, sender__in=definition.names)
    found = Delivery.objects.using(outbox.database().alias).filter(to_it | of_it)
    first = list(found.order_by("pk")[:MOST])
    if len(first) < MOST:
        return first, len(first)
    last = list(found.order_by("-pk")[: MOST // 2])[::-1]
    first = [row for row in first[: MOST // 2] if row.pk < last[0].pk]
    return [*first, *last], found.count()


def _instance(instance: WorkflowState, unmasked: bool, secrets: set[str]) -> dict[str, Any]:
    values = masking.values_of(instance)
    if unmasked:
        values = {f.name: getattr(instance, f.attname) for f in instance._meta.concrete_fields}
    own = {name: value for name, value in values.items() if name not in MANAGED}
    return {
        **{name: values[name] for name in MANAGED},
        "fields": masking.hidden(own, secrets) if secrets else own,
    }


def _delivery(
    delivery: Delivery, instance: WorkflowState, unmasked: bool, secrets: set[str]
) -> dict[str, Any]:
    to_it, of_it = delivery.instance_id == instance.pk, delivery.sender_instance_id == instance.pk
    shown = delivery if unmasked else masking.masked(delivery, secrets)
    columns = {f.name: getattr(shown, f.attname) for f in Delivery._meta.concrete_fields}
    for name in ("body", "original_body"):
        columns[name] = _parsed(columns[name])
    direction = "itself" if to_it and of_it else "to" if to_it else "from"
    return {"direction": direction, **columns}


def _parsed(body: str) -> Any:
    """The body as it reads; a body that is no JSON as its text."""
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        return body


class _Encoder(DjangoJSONEncoder):
    """Writes what JSON does not know as text, and times in full."""

    def default(self, value: Any) -> Any:
        if isinstance(value, datetime):
            return value.isoformat()
        try:
            return super().default(value)
        except TypeError:
            return str(value)
