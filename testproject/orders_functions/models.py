from django.db import models

from django_workflows.models import WorkflowState
from testproject.rows import OrderRow, ParcelRow, PaymentRow, RowPerOrder


class FulfilmentState(WorkflowState):
    class Status(models.TextChoices):
        PLACED = "placed"
        PAID = "paid"
        PICKED = "picked"
        SHIPPED = "shipped"
        COMPLETED = "completed"
        DECLINED = "declined"
        NOT_SHIPPED = "not shipped"

    order_id = models.UUIDField(unique=True)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    status = models.CharField(max_length=20, choices=Status.choices, default=Status.PLACED)
    declined_because = models.CharField(max_length=200, blank=True)
    paid_at = models.DateTimeField(null=True)
    shipped_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "fulfilment"

    def __str__(self) -> str:
        return f"Fulfilment of order {self.order_id}: {self.status}"


class CreditCheckState(WorkflowState):
    order_id = models.UUIDField(unique=True)
    approved = models.BooleanField(null=True)

    class Meta:
        verbose_name = "credit check"

    def __str__(self) -> str:
        return f"Credit check of order {self.order_id}"


class BatchOrderState(WorkflowState):
    batch_id = models.UUIDField(unique=True)
    parcels = models.PositiveIntegerField()
    grams = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name = "batch order"
        verbose_name_plural = "batch orders"

    def __str__(self) -> str:
        return f"Batch order {self.batch_id} of {self.parcels} parcels"


class Order(OrderRow):
    pass


class Payment(PaymentRow):
    pass


class Refund(PaymentRow):
    pass


class Pick(RowPerOrder):
    pass


class Restock(RowPerOrder):
    pass


class Shipment(RowPerOrder):
    pass


class Receipt(RowPerOrder):
    pass


class Parcel(ParcelRow):
    pass
