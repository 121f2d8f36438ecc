"""The order process of the test project, with handlers that do nothing but reply.

The workflow, its messages and its state are those of `testproject.orders`: place order, take
payment, pick stock, ship, send receipt, with the timeout of the payment. The handlers are not: the
rows that the test project writes through the ORM are its own work and would hide the engine's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

from django_workflows import (
    Event,
    HandlerContext,
    dispatch,
    handles,
    observing,
    outbox,
    publish,
    registry,
)
from django_workflows.testing import isolated_registry
from testproject.orders import messages
from testproject.orders.models import FulfilmentState

ANSWERS = {
    messages.TakePayment: messages.PaymentTaken,
    messages.PickStock: messages.StockPicked,
    messages.ShipOrder: messages.OrderShipped,
    messages.SendReceipt: messages.ReceiptSent,
}


class Process:
    """Orders, and the deliveries of them that wait in this process in place of a broker."""

    hands_over = True

    def __init__(self) -> None:
        self._waiting: deque[UUID] = deque()

    def hand_over(self, queue: str, ids: Sequence[UUID]) -> None:
        self._waiting.extend(ids)

    def place_order(self) -> None:
        order_id = uuid4()
        publish(messages.OrderPlaced(order_id=order_id, amount=Decimal("19.90")))

    def deliver_one(self) -> bool:
        """Handle the next delivery. False: nothing waits any more."""
        if not self._waiting:
            return False
        dispatch.deliver(self._waiting.popleft())
        return True

    def deliver_all(self) -> int:
        """Carry on until every order has come to its end; how many deliveries that took."""
        count = 0
        while self.deliver_one():
            count += 1
        return count


@contextmanager
def lean_process() -> Iterator[Process]:
    """Declare the process, and nothing else, while the block runs; nobody observes it."""
    fulfilment = registry.current().recipient(FulfilmentState._meta.label)
    assert fulfilment is not None
    process, transport, observers = Process(), outbox.transport, observing.observers
    with isolated_registry() as declared:
        declared.add(fulfilment)
        for command, answer in ANSWERS.items():
            handles(command, name=f"benchmarks.{command.__name__}")(_replying_with(answer))
        for undo in (messages.RefundPayment, messages.PutStockBack):  # noted, and never sent
            handles(undo, name=f"benchmarks.{undo.__name__}")(lambda _message, _context: None)
        outbox.transport, observing.observers = process, ()
        try:
            yield process
        finally:
            outbox.transport, observing.observers = transport, observers


def _replying_with(answer: type[Event]) -> Callable[[Any, HandlerContext], None]:
    def handler(message: Any, context: HandlerContext) -> None:
        context.reply(answer(order_id=message.order_id))

    return handler
