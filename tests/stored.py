"""Deliveries put into the table as they are, for tests of what is done to rows."""

from typing import Any

from django.utils import timezone
from uuid_utils.compat import uuid7

from django_workflows.models import UNENDED, Delivery, Status


def stored(**fields: Any) -> Delivery:
    """A row that failed, unless `status` or other fields say otherwise."""
    now = timezone.now()
    message_id = fields.pop("message_id", None) or uuid7()
    status = fields.get("status", Status.FAILED)
    unended = status in UNENDED
    given = {
        "message_id": message_id,
        "message_name": "orders.TakePayment",
        "body": "{}",
        "correlation_id": message_id,
        "handler": "orders.take_payment",
        "status": status,
        "created_at": now,
        "due_at": now,
        "relay_at": now if unended else None,
        "ended_at": None if unended else now,
        **fields,
    }
    return Delivery.objects.create(**given)


def many_failed(number: int, **fields: Any) -> None:
    """So many rows that failed, alike but for their ids."""
    template = stored(**fields)
    template.delete()
    rows = [
        Delivery(
            **{
                field.attname: getattr(template, field.attname)
                for field in Delivery._meta.concrete_fields
                if field.attname not in ("id", "message_id")
            },
            message_id=uuid7(),
        )
        for _ in range(number)
    ]
    Delivery.objects.bulk_create(rows, batch_size=500)
