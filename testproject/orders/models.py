from django.db import models

from django_workflows.models import WorkflowState
from testproject.rows import OrderRow, PaymentRow, RowPerOrder


class FulfilmentState(WorkflowState):
    class Status(models.TextChoices):
        PLACED = "placed"
        PAID = "paid"
        PICKED = "picked"
        SHIPPED = "shipped"
        COMPLETED = "completed"
        DECLINED = "declined"

    order_id = models.UUIDField(unique=True)
    status = models.CharField(max_length=20, choices=Status.choices, default=Status.PLACED)
    declined_because = models.CharField(max_length=200, blank=True)
    paid_at = models.DateTimeField(null=True)
    shipped_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "fulfilment"

    def __str__(self) -> str:
        return f"Fulfilment of order {self.order_id}: {self.status}"


class Order(OrderRow):
    pass


class Payment(PaymentRow):
    pass


class Pick(RowPerOrder):
    pass


class Shipment(RowPerOrder):
    pass


class Receipt(RowPerOrder):
    pass
