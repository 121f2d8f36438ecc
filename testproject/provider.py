"""A pretend payment provider: it declines some orders and breaks down now and then.

What it does follows from the order's id, the number of the attempt and two settings alone, so
the same order always ends the same way. PAYMENT_DECLINE_RATE is the share of the orders that it
declines, PAYMENT_FLAKY_RATE the share of the attempts at which it raises instead of answering:
0 is never, 1 is always.
"""

from uuid import UUID

from django.conf import settings

from testproject.chance import share


class ProviderError(Exception):
    """The payment provider gave no answer this time; another attempt may get one."""


def charge(order_id: UUID, *, attempt: int) -> bool:
    """Whether the payment for this order was accepted. Raises `ProviderError`."""
    if share(order_id, f"attempt {attempt}") < settings.PAYMENT_FLAKY_RATE:
        raise ProviderError(f"No answer about order {order_id} at attempt {attempt}.")
    is_declined = share(order_id, "decline") < settings.PAYMENT_DECLINE_RATE
    return not is_declined
