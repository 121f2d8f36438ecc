"""The work behind the orders: each handler does one thing, writes its row and replies."""

from django_workflows import HandlerContext, handles
from testproject import agency, carrier, provider
from testproject.orders.messages import (
    AgencyAnswered,
    AskAgency,
    OrderShipped,
    PackParcel,
    ParcelPacked,
    PaymentDeclined,
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
from testproject.orders.models import (
    Parcel,
    Payment,
    Pick,
    Receipt,
    Refund,
    Restock,
    Shipment,
)


@handles(TakePayment)
def take_payment(message: TakePayment, context: HandlerContext) -> None:
    if not provider.charge(message.order_id, attempt=context.attempt):
        context.reply(PaymentDeclined(order_id=message.order_id, reason="declined by provider"))
        return
    Payment.objects.create(order_id=message.order_id, amount=message.amount)
    context.reply(PaymentTaken(order_id=message.order_id))


@handles(RefundPayment)
def refund_payment(message: RefundPayment, context: HandlerContext) -> None:
    Refund.objects.create(order_id=message.order_id, amount=message.amount)


@handles(PickStock)
def pick_stock(message: PickStock, context: HandlerContext) -> None:
    Pick.objects.create(order_id=message.order_id)
    context.reply(StockPicked(order_id=message.order_id))


@handles(PutStockBack)
def put_stock_back(message: PutStockBack, context: HandlerContext) -> None:
    Restock.objects.create(order_id=message.order_id)


@handles(ShipOrder, unrecoverable=[carrier.Undeliverable])
def ship_order(message: ShipOrder, context: HandlerContext) -> None:
    carrier.ship(message.order_id)
    Shipment.objects.create(order_id=message.order_id)
    context.reply(OrderShipped(order_id=message.order_id))


@handles(SendReceipt)
def send_receipt(message: SendReceipt, context: HandlerContext) -> None:
    Receipt.objects.create(order_id=message.order_id)
    context.reply(ReceiptSent(order_id=message.order_id))


@handles(AskAgency)
def ask_agency(message: AskAgency, context: HandlerContext) -> None:
    approved = agency.ask(message.order_id)
    if approved is not None:
        context.reply(AgencyAnswered(approved=approved))


@handles(PackParcel)
def pack_parcel(message: PackParcel, context: HandlerContext) -> None:
    parcel = Parcel.objects.create(
        batch_id=message.batch_id, number=message.parcel, grams=500 + message.parcel
    )
    context.reply(ParcelPacked(parcel=parcel.number, grams=parcel.grams))
