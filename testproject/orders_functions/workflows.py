"""The fulfilment of an order, a check of credit and a batch order, as functions."""

from django.conf import settings
from django.utils import timezone

from django_workflows import CommandFailed, WorkflowContext, define_workflow
from testproject.orders_functions.messages import (
    AgencyAnswered,
    AgencyOverdue,
    AskAgency,
    BatchPlaced,
    CheckCredit,
    CreditChecked,
    OrderPlaced,
    OrderShipped,
    PackParcel,
    ParcelPacked,
    PaymentDeclined,
    PaymentOverdue,
    PaymentTaken,
    PickStock,
    PutStockBack,
    ReceiptSent,
    RefundPayment,
    SendReceipt,
    ShipOrder,
    StockPicked,
    TakePayment,
)
from testproject.orders_functions.models import BatchOrderState, CreditCheckState, FulfilmentState

Status = FulfilmentState.Status

# From an order to its receipt. It ends early when there is no credit or no payment, and is undone
# when nobody can ship.

Context = WorkflowContext[FulfilmentState]

fulfilment = define_workflow(FulfilmentState)


@fulfilment.started_by(OrderPlaced, once_per="order_id")
def begin(message: OrderPlaced, state: FulfilmentState, context: Context) -> None:
    state.amount = message.amount
    if message.amount > settings.CREDIT_CHECK_OVER:
        context.send(CheckCredit(order_id=message.order_id, amount=message.amount))
    else:
        take_payment(state, context)


@fulfilment.when(CreditChecked)
def heed_credit(message: CreditChecked, state: FulfilmentState, context: Context) -> None:
    if message.approved:
        take_payment(state, context)
    else:
        decline(state, context, message.reason)


def take_payment(state: FulfilmentState, context: Context) -> None:
    context.send(TakePayment(order_id=state.order_id, amount=state.amount))
    context.send(PaymentOverdue(), delay=settings.PAYMENT_OVERDUE_AFTER)


@fulfilment.when(PaymentTaken)
def pick_stock(message: PaymentTaken, state: FulfilmentState, context: Context) -> None:
    state.status = Status.PAID
    state.paid_at = timezone.now()
    context.cancel(PaymentOverdue)
    context.send(PickStock(order_id=message.order_id))


@fulfilment.when(PaymentDeclined)
def heed_decline(message: PaymentDeclined, state: FulfilmentState, context: Context) -> None:
    decline(state, context, message.reason)


@fulfilment.when(PaymentOverdue)
def give_up(message: PaymentOverdue, state: FulfilmentState, context: Context) -> None:
    # A payment that comes after all finds the instance ended; a real shop would refund it.
    decline(state, context, "payment overdue")


def decline(state: FulfilmentState, context: Context, reason: str) -> None:
    state.status = Status.DECLINED
    state.declined_because = reason
    context.complete()


@fulfilment.when(StockPicked)
def ship(message: StockPicked, state: FulfilmentState, context: Context) -> None:
    state.status = Status.PICKED
    # Undone newest first: the money goes back before the stock does.
    context.compensate_with(PutStockBack(order_id=message.order_id))
    context.compensate_with(RefundPayment(order_id=message.order_id, amount=state.amount))
    context.send(ShipOrder(order_id=message.order_id))


@fulfilment.on_failure(ShipOrder)
def undo(
    command: ShipOrder, failure: CommandFailed, state: FulfilmentState, context: Context
) -> None:
    state.status = Status.NOT_SHIPPED
    context.compensate()


@fulfilment.when(OrderShipped)
def send_receipt(message: OrderShipped, state: FulfilmentState, context: Context) -> None:
    state.status = Status.SHIPPED
    state.shipped_at = timezone.now()
    context.send(SendReceipt(order_id=message.order_id))


@fulfilment.when(ReceiptSent)
def finish(message: ReceiptSent, state: FulfilmentState, context: Context) -> None:
    state.status = Status.COMPLETED
    context.complete()


# A child of a fulfilment: it replies to the instance that asked, and asks only so long.

CreditContext = WorkflowContext[CreditCheckState]

credit_check = define_workflow(CreditCheckState)


@credit_check.started_by(CheckCredit, once_per="order_id")
def ask(message: CheckCredit, state: CreditCheckState, context: CreditContext) -> None:
    context.send(AskAgency(order_id=message.order_id, amount=message.amount))
    context.send(AgencyOverdue(), delay=settings.AGENCY_OVERDUE_AFTER)


@credit_check.when(AgencyAnswered)
def pass_on(message: AgencyAnswered, state: CreditCheckState, context: CreditContext) -> None:
    answer(state, context, message.approved, "" if message.approved else "credit refused by agency")


@credit_check.when(AgencyOverdue)
def stop_asking(message: AgencyOverdue, state: CreditCheckState, context: CreditContext) -> None:
    answer(state, context, False, "no answer from agency")


def answer(state: CreditCheckState, context: CreditContext, approved: bool, reason: str) -> None:
    state.approved = approved
    context.reply(CreditChecked(approved=approved, reason=reason))
    context.complete()


# Has all parcels of a batch packed at once, and goes on when the last one is.

BatchContext = WorkflowContext[BatchOrderState]

batch_order = define_workflow(BatchOrderState)


@batch_order.started_by(BatchPlaced, once_per="batch_id")
def pack(message: BatchPlaced, state: BatchOrderState, context: BatchContext) -> None:
    state.parcels = message.parcels
    for parcel in range(1, message.parcels + 1):
        context.send(PackParcel(batch_id=message.batch_id, parcel=parcel))


@batch_order.when_all(ParcelPacked, count="parcels", distinct="parcel")
def weigh(messages: list[ParcelPacked], state: BatchOrderState, context: BatchContext) -> None:
    state.grams = sum(message.grams for message in messages)
    context.complete()
