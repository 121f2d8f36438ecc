"""A process of two messages and their answers, of which one needs a second attempt."""

from typing import Any

from django_workflows import Command, Event, HandlerContext, define_workflow, handles
from tests.models import ParcelState


class ParcelPosted(Event, name="observed.ParcelPosted"):
    pass


class WeighParcel(Command, name="observed.WeighParcel"):
    pass


class ParcelWeighed(Event, name="observed.ParcelWeighed"):
    pass


def declare() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        context.send(WeighParcel())

    @workflow.when(ParcelWeighed)
    def weighed(message: ParcelWeighed, state: ParcelState, context: Any) -> None:
        context.complete()

    @handles(WeighParcel, name="observed.weigh")
    def weigh(message: WeighParcel, context: HandlerContext) -> None:
        if context.attempt == 1:
            raise ValueError("no scales yet")
        context.reply(ParcelWeighed())
