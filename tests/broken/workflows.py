"""Each workflow is wrong in a way of its own."""

import os
from typing import Any

from django_workflows import Workflow, define_workflow, handles, started_by, when
from tests.broken.messages import Act, Placed
from tests.broken.models import (
    FirstState,
    ProxyState,
    ReservedState,
    RightState,
    SecondState,
    UnstartedState,
)
from tests.outside import Stray


class Lookups(Workflow[RightState]):
    @started_by(Placed, once_per="number")  # not unique
    def start(self, message: Placed) -> None: ...

    @when(Placed, lookup="number", maps_to="day")  # an int is no date
    def never(self, message: Placed) -> None: ...

    @when(Act, lookup=lambda message: 1, maps_to="number")  # no index
    async def later(self, message: Act) -> None: ...  # not called

    @when(Stray, lookup=lambda message: 1, maps_to="nothing")  # no field
    def stray(self, message: Stray) -> None: ...


class Unstarted(Workflow[UnstartedState]):
    @when(Placed)
    def go_on(self, message: Placed) -> None: ...


@handles(Act)  # the workflow above handles it
def act(message: Any, context: Any) -> None: ...


for state in (RightState, ProxyState, ReservedState, FirstState, SecondState):

    @define_workflow(state).started_by(Placed)
    def start(message: Any, state: Any, context: Any) -> None: ...


if os.environ.get("HIDDEN") == "step":

    class Hiding(Workflow[RightState]):
        @started_by(Placed)
        def send(self, message: Placed) -> None: ...  # type: ignore[override]
