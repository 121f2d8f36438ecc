"""The fulfilment of an order, declared as a class."""

from django.conf import settings
from django.utils import timezone

from django_workflows import Workflow, started_by, when
from testproject.orders.messages import (
    OrderPlaced,
    OrderShipped,
    PaymentDeclined,
    PaymentOverdue,
    PaymentTaken,
    PickStock,
    ReceiptSent,
    SendReceipt,
    ShipOrder,
    StockPicked,
    TakePayment,
)
from testproject.orders.models import FulfilmentState

Status = FulfilmentState.Status


class Fulfilment(Workflow[FulfilmentState]):
    """From an order to its receipt; it ends early when no payment comes."""

    @started_by(OrderPlaced, once_per="order_id")
    def take_payment(self, message: OrderPlaced) -> None:
        self.send(TakePayment(order_id=message.order_id, amount=message.amount))
        self.send(PaymentOverdue(), delay=settings.PAYMENT_OVERDUE_AFTER)

    @when(PaymentTaken)
    def pick_stock(self, message: PaymentTaken) -> None:
        self.state.status = Status.PAID
        self.state.paid_at = timezone.now()
        self.cancel(PaymentOverdue)
        self.send(PickStock(order_id=message.order_id))

    @when(PaymentDeclined)
    def decline(self, message: PaymentDeclined) -> None:
        self.state.status = Status.DECLINED
        self.state.declined_because = message.reason
        self.cancel(PaymentOverdue)
        self.complete()

    @when(PaymentOverdue)
    def give_up(self, message: PaymentOverdue) -> None:
        self.state.status = Status.DECLINED
        # A payment that comes after all finds the instance ended; a real shop would refund it.
        self.state.declined_because = "payment overdue"
        self.complete()

    @when(StockPicked)
    def ship(self, message: StockPicked) -> None:
        self.state.status = Status.PICKED
        self.send(ShipOrder(order_id=message.order_id))

    @when(OrderShipped)
    def send_receipt(self, message: OrderShipped) -> None:
        self.state.status = Status.SHIPPED
        self.state.shipped_at = timezone.now()
        self.send(SendReceipt(order_id=message.order_id))

    @when(ReceiptSent)
    def finish(self, message: ReceiptSent) -> None:
        self.state.status = Status.COMPLETED
        self.complete()
