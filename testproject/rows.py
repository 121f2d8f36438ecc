"""The tables that both variants of the process have, each app its own set.

What is done for an order, and undone, is unique per order, and a parcel per batch: work that is
done twice raises.
"""

import uuid

from django.db import models
from django.db.models.functions import Now


class OrderRow(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    message_id = models.UUIDField(
        help_text="The OrderPlaced event that this order was placed with."
    )
    batch = models.UUIDField(
        null=True, db_index=True, help_text="The run of demo or place_orders that placed it."
    )
    placed_at = models.DateTimeField(db_default=Now())

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"Order {self.pk}"


class RowPerOrder(models.Model):
    order_id = models.UUIDField(unique=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{type(self).__name__} of order {self.order_id}"


class PaymentRow(RowPerOrder):
    amount = models.DecimalField(max_digits=10, decimal_places=2)

    class Meta:
        abstract = True


class ParcelRow(models.Model):
    batch_id = models.UUIDField()
    number = models.PositiveIntegerField()
    grams = models.PositiveIntegerField()

    class Meta:
        abstract = True
        constraints = (
            models.UniqueConstraint(
                fields=["batch_id", "number"], name="%(app_label)s_one_parcel_of_a_number"
            ),
        )

    def __str__(self) -> str:
        return f"Parcel {self.number} of batch {self.batch_id}"
