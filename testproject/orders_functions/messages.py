from decimal import Decimal
from uuid import UUID

from django_workflows import Command, Event


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


class PickStock(Command):
    order_id: UUID


class StockPicked(Event):
    order_id: UUID


class ShipOrder(Command):
    order_id: UUID


class OrderShipped(Event):
    order_id: UUID


class SendReceipt(Command):
    order_id: UUID


class ReceiptSent(Event):
    order_id: UUID
