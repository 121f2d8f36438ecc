"""The fulfilment of an order, declared with functions."""

from django.conf import settings
from django.utils import timezone

from django_workflows import WorkflowContext, define_workflow
from testproject.orders_functions.messages import (
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
from testproject.orders_functions.models import FulfilmentState

Status = FulfilmentState.Status
Context = WorkflowContext[FulfilmentState]

fulfilment = define_workflow(FulfilmentState)


@fulfilment.started_by(OrderPlaced, once_per="order_id")
def take_payment(message: OrderPlaced, state: FulfilmentState, context: Context) -> None:
    context.send(TakePayment(order_id=message.order_id, amount=message.amount))
    context.send(PaymentOverdue(), delay=settings.PAYMENT_OVERDUE_AFTER)


@fulfilment.when(PaymentTaken)
def pick_stock(message: PaymentTaken, state: FulfilmentState, context: Context) -> None:
    state.status = Status.PAID
    state.paid_at = timezone.now()
    context.cancel(PaymentOverdue)
    context.send(PickStock(order_id=message.order_id))


@fulfilment.when(PaymentDeclined)
def decline(message: PaymentDeclined, state: FulfilmentState, context: Context) -> None:
    state.status = Status.DECLINED
    state.declined_because = message.reason
    context.cancel(PaymentOverdue)
    context.complete()


@fulfilment.when(PaymentOverdue)
def give_up(message: PaymentOverdue, state: FulfilmentState, context: Context) -> None:
    state.status = Status.DECLINED
    # A payment that comes after all finds the instance ended; a real shop would refund it.
    state.declined_because = "payment overdue"
    context.complete()


@fulfilment.when(StockPicked)
def ship(message: StockPicked, state: FulfilmentState, context: Context) -> None:
    state.status = Status.PICKED
    context.send(ShipOrder(order_id=message.order_id))


@fulfilment.when(OrderShipped)
def send_receipt(message: OrderShipped, state: FulfilmentState, context: Context) -> None:
    state.status = Status.SHIPPED
    state.shipped_at = timezone.now()
    context.send(SendReceipt(order_id=message.order_id))


@fulfilment.when(ReceiptSent)
def finish(message: ReceiptSent, state: FulfilmentState, context: Context) -> None:
    state.status = Status.COMPLETED
    context.complete()
