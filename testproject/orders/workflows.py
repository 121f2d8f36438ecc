"""The fulfilment of an order, a check of credit and a batch order, as classes."""

from django.conf import settings
from django.utils import timezone

from django_workflows import (
    CommandFailed,
    Workflow,
    on_failure,
    started_by,
    when,
    when_all,
)
from testproject.orders.messages import (
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
from testproject.orders.models import BatchOrderState, CreditCheckState, FulfilmentState

Status = FulfilmentState.Status


class Fulfilment(Workflow[FulfilmentState]):
    """From an order to its receipt.

    It ends early when there is no credit or no payment, and is undone when nobody can ship.
    """

    @started_by(OrderPlaced, once_per="order_id")
    def begin(self, message: OrderPlaced) -> None:
        self.state.amount = message.amount
        if message.amount > settings.CREDIT_CHECK_OVER:
            self.send(CheckCredit(order_id=message.order_id, amount=message.amount))
        else:
            self.take_payment()

    @when(CreditChecked)
    def heed_credit(self, message: CreditChecked) -> None:
        if message.approved:
            self.take_payment()
        else:
            self.decline(message.reason)

    def take_payment(self) -> None:
        self.send(TakePayment(order_id=self.state.order_id, amount=self.state.amount))
        self.send(PaymentOverdue(), delay=settings.PAYMENT_OVERDUE_AFTER)

    @when(PaymentTaken)
    def pick_stock(self, message: PaymentTaken) -> None:
        self.state.status = Status.PAID
        self.state.paid_at = timezone.now()
        self.cancel(PaymentOverdue)
        self.send(PickStock(order_id=message.order_id))

    @when(PaymentDeclined)
    def heed_decline(self, message: PaymentDeclined) -> None:
        self.decline(message.reason)

    @when(PaymentOverdue)
    def give_up(self, message: PaymentOverdue) -> None:
        # A payment that comes after all finds the instance ended; a real shop would refund it.
        self.decline("payment overdue")

    def decline(self, reason: str) -> None:
        self.state.status = Status.DECLINED
        self.state.declined_because = reason
        self.complete()

    @when(StockPicked)
    def ship(self, message: StockPicked) -> None:
        self.state.status = Status.PICKED
        # Undone newest first: the money goes back before the stock does.
        self.compensate_with(PutStockBack(order_id=message.order_id))
        self.compensate_with(RefundPayment(order_id=message.order_id, amount=self.state.amount))
        self.send(ShipOrder(order_id=message.order_id))

    @on_failure(ShipOrder)
    def undo(self, command: ShipOrder, failure: CommandFailed) -> None:
        self.state.status = Status.NOT_SHIPPED
        self.compensate()

    @when(OrderShipped)
    def send_receipt(self, message: OrderShipped) -> None:
        self.state.status = Status.SHIPPED
        self.state.shipped_at = timezone.now()
        self.send(SendReceipt(order_id=message.order_id))

    @when(ReceiptSent)
    def finish(self, message: ReceiptSent) -> None:
        self.state.status = Status.COMPLETED
        self.complete()


class CreditCheck(Workflow[CreditCheckState]):
    """A child of a fulfilment: it replies to the instance that asked, and asks only so long."""

    @started_by(CheckCredit, once_per="order_id")
    def ask(self, message: CheckCredit) -> None:
        self.send(AskAgency(order_id=message.order_id, amount=message.amount))
        self.send(AgencyOverdue(), delay=settings.AGENCY_OVERDUE_AFTER)

    @when(AgencyAnswered)
    def pass_on(self, message: AgencyAnswered) -> None:
        self.answer(message.approved, "" if message.approved else "credit refused by agency")

    @when(AgencyOverdue)
    def stop_asking(self, message: AgencyOverdue) -> None:
        self.answer(False, "no answer from agency")

    def answer(self, approved: bool, reason: str) -> None:
        self.state.approved = approved
        self.reply(CreditChecked(approved=approved, reason=reason))
        self.complete()


class BatchOrder(Workflow[BatchOrderState]):
    """Has all parcels of a batch packed at once, and goes on when the last one is."""

    @started_by(BatchPlaced, once_per="batch_id")
    def pack(self, message: BatchPlaced) -> None:
        self.state.parcels = message.parcels
        for parcel in range(1, message.parcels + 1):
            self.send(PackParcel(batch_id=message.batch_id, parcel=parcel))

    @when_all(ParcelPacked, count="parcels", distinct="parcel")
    def weigh(self, messages: list[ParcelPacked]) -> None:
        self.state.grams = sum(message.grams for message in messages)
        self.complete()
