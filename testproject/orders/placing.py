import uuid
from decimal import Decimal
from uuid import UUID

from django.db import IntegrityError, transaction

from django_workflows import publish
from testproject.orders.messages import BatchPlaced, OrderPlaced
from testproject.orders.models import Order


def place_order(
    order_id: UUID | None = None,
    amount: Decimal = Decimal("19.90"),
    *,
    batch: UUID | None = None,
) -> Order:
    """Store the order and announce it, both or neither, in a transaction of its own.

    Placing the same `order_id` again changes nothing and returns the order that is there.
    """
    order_id = order_id or uuid.uuid4()
    try:
        with transaction.atomic():
            [message_id] = publish(OrderPlaced(order_id=order_id, amount=amount))
            return Order.objects.create(
                id=order_id, amount=amount, batch=batch, message_id=message_id
            )
    except IntegrityError:
        return Order.objects.get(id=order_id)


def place_batch(parcels: int, batch_id: UUID | None = None) -> UUID:
    """Announce a batch of so many parcels; its id. The same `batch_id` again starts nothing."""
    batch_id = batch_id or uuid.uuid4()
    publish(BatchPlaced(batch_id=batch_id, parcels=parcels))
    return batch_id
