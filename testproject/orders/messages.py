from decimal import Decimal
from uuid import UUID

from django_workflows import Command, Event

# The fulfilment of an order


class OrderPlaced(Event):
    order_id: UUID
    amount: Decimal


class TakePayment(Command):
    order_id: UUID
    amount: Decimal


class PaymentTaken(Event):
    order_id: UUID


class PaymentDeclined(Event):
    order_id: UUID
    reason: str


class PaymentOverdue(Command):
    """The timeout of the payment: the workflow sends it to itself, later."""


class RefundPayment(Command):
    """Undoes TakePayment."""

    order_id: UUID
    amount: Decimal


class PickStock(Command):
    order_id: UUID


class StockPicked(Event):
    order_id: UUID


class PutStockBack(Command):
    """Undoes PickStock."""

    order_id: UUID


class ShipOrder(Command):
    order_id: UUID


class OrderShipped(Event):
    order_id: UUID


class SendReceipt(Command):
    order_id: UUID


class ReceiptSent(Event):
    order_id: UUID


# The credit check of a large order


class CheckCredit(Command):
    order_id: UUID
    amount: Decimal


class AskAgency(Command):
    order_id: UUID
    amount: Decimal


class AgencyAnswered(Event):
    approved: bool


class AgencyOverdue(Command):
    """The timeout of the agency's answer."""


class CreditChecked(Event):
    """The reply to CheckCredit."""

    approved: bool
    reason: str = ""


# An order of many parcels


class BatchPlaced(Event):
    batch_id: UUID
    parcels: int


class PackParcel(Command):
    batch_id: UUID
    parcel: int


class ParcelPacked(Event):
    parcel: int
    grams: int
