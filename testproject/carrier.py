"""A pretend carrier: some orders it cannot deliver, however often it is asked.

SHIPMENT_FAIL_RATE is the share of the orders that it refuses; which ones follows from their ids.
"""

from uuid import UUID

from django.conf import settings

from testproject.chance import share


class Undeliverable(Exception):
    """The carrier refuses the order for good; another attempt would be refused too."""


def ship(order_id: UUID) -> None:
    """Raises `Undeliverable`."""
    if share(order_id, "ship") < settings.SHIPMENT_FAIL_RATE:
        raise Undeliverable(f"Nobody can deliver order {order_id}.")
