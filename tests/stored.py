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
