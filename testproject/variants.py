"""The two declarations of the same process, for whatever is to run on both."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import UUID

from testproject.orders import handlers, messages, models, placing, workflows
from testproject.orders_functions import handlers as f_handlers
from testproject.orders_functions import messages as f_messages
from testproject.orders_functions import models as f_models
from testproject.orders_functions import placing as f_placing
from testproject.orders_functions import workflows as f_workflows
from testproject.rows import OrderRow


@dataclass(frozen=True)
class Variant:
    """One declaration. Its messages, models and handlers have the same names in both.

    `state` is the state model of the fulfilment and `order` the model of what is placed; `rows` are
    the models that its command handlers write, by the name that a summary gives them.
    """

    style: str
    app_label: str
    place_order: Callable[..., OrderRow]
    place_batch: Callable[..., UUID]
    fulfilment: Any
    credit_check: Any
    batch_order: Any
    messages: ModuleType
    handlers: ModuleType
    models: ModuleType
    state: Any
    order: Any
    rows: dict[str, Any]

    def __str__(self) -> str:
        return self.style


CLASS = Variant(
    style="class",
    app_label="orders",
    place_order=placing.place_order,
    place_batch=placing.place_batch,
    fulfilment=workflows.Fulfilment,
    credit_check=workflows.CreditCheck,
    batch_order=workflows.BatchOrder,
    messages=messages,
    handlers=handlers,
    models=models,
    state=models.FulfilmentState,
    order=models.Order,
    rows={
        "payments": models.Payment,
        "picks": models.Pick,
        "shipments": models.Shipment,
        "receipts": models.Receipt,
        "refunds": models.Refund,
        "restocks": models.Restock,
    },
)

FUNCTIONS = Variant(
    style="functions",
    app_label="orders_functions",
    place_order=f_placing.place_order,
    place_batch=f_placing.place_batch,
    fulfilment=f_workflows.fulfilment,
    credit_check=f_workflows.credit_check,
    batch_order=f_workflows.batch_order,
    messages=f_messages,
    handlers=f_handlers,
    models=f_models,
    state=f_models.FulfilmentState,
    order=f_models.Order,
    rows={
        "payments": f_models.Payment,
        "picks": f_models.Pick,
        "shipments": f_models.Shipment,
        "receipts": f_models.Receipt,
        "refunds": f_models.Refund,
        "restocks": f_models.Restock,
    },
)

VARIANTS = {variant.style: variant for variant in (CLASS, FUNCTIONS)}
