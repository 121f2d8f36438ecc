"""What log records say about deliveries: fields by name, and a filter that adds them to any record.

LOGGING is read before the apps are loaded, so nothing here touches a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

#: The fields of a record that is about a delivery.
FACTS = (
    "delivery_id",
    "delivery_attempt",
    "delivery_handler",
    "delivery_workflow",
    "delivery_instance",
    "delivery_message",
    "delivery_message_id",
    "delivery_correlation_id",
)


def nothing() -> Mapping[str, Any]:
    return {}


#: The facts of the delivery whose handler or step runs on this thread; set by `context`.
facts_now: Callable[[], Mapping[str, Any]] = nothing


class DeliveryFilter(logging.Filter):
    """Adds the facts of the current delivery to every record that passes: put it on a handler.

    While a handler or step runs on this thread, whoever logs; what a record already says stays.
    Every record that passes has all the fields then, None where there is nothing to say, so that
    a format string can name them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        facts = facts_now()
        for name in FACTS:
            if not hasattr(record, name):
                setattr(record, name, facts.get(name))
        return bool(super().filter(record))
