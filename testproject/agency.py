"""A pretend credit agency: it refuses some customers, and about some it never answers.

CREDIT_REFUSE_RATE and CREDIT_SILENT_RATE are the shares of the orders that it refuses, and that
it says nothing about; which ones follows from their ids.
"""

from uuid import UUID

from django.conf import settings

from testproject.chance import share


def ask(order_id: UUID) -> bool | None:
    """Whether the customer is good for it; None when the agency says nothing."""
    if share(order_id, "silent") < settings.CREDIT_SILENT_RATE:
        return None
    is_refused = share(order_id, "credit") < settings.CREDIT_REFUSE_RATE
    return not is_refused
