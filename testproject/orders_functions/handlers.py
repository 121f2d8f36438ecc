"""What the fulfilment orders: each handler does one thing, writes its row and replies."""

from django_workflows import HandlerContext, handles
from testproject import provider
from testproject.orders_functions.messages import (
    OrderShipped,
    PaymentDeclined,
    PaymentTaken,
    PickStock,
    ReceiptSent,
    SendReceipt,
    ShipOrder,
    StockPicked,
    TakePayment,
)
from testproject.orders_functions.models import Payment, Pick, Receipt, Shipment


@handles(TakePayment)
def take_payment(message: TakePayment, context: HandlerContext) -> None:
    if not provider.charge(message.order_id, attempt=context.attempt):
        context.reply(PaymentDeclined(order_id=message.order_id, reason="declined by provider"))
        return
    Payment.objects.create(order_id=message.order_id, amount=message.amount)
    context.reply(PaymentTaken(order_id=message.order_id))


@handles(PickStock)
def pick_stock(message: PickStock, context: HandlerContext) -> None:
    Pick.objects.create(order_id=message.order_id)
    context.reply(StockPicked(order_id=message.order_id))


@handles(ShipOrder)
def ship_order(message: ShipOrder, context: HandlerContext) -> None:
    Shipment.objects.create(order_id=message.order_id)
    context.reply(OrderShipped(order_id=message.order_id))


@handles(SendReceipt)
def send_receipt(message: SendReceipt, context: HandlerContext) -> None:
    Receipt.objects.create(order_id=message.order_id)
    context.reply(ReceiptSent(order_id=message.order_id))
