"""A context that records, for calling a step or handler without a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast
from uuid import UUID, uuid4

from django_workflows import registry
from django_workflows.context import Context, Effects, HandlerContext, entered
from django_workflows.declarations import WorkflowDefinition
from django_workflows.errors import NotDeclared
from django_workflows.messages import Command, Message, to_json
from django_workflows.models import Delivery, Lifecycle, WorkflowState
from django_workflows.notices import CommandFailed, Outcome, WorkflowEnded
from django_workflows.outbox import Origin, Terms
from django_workflows.workflows import state_model


@dataclass
class Recorded:
    """What a handler or step has asked for. Its `context` is what it is called with.

    For a workflow that is a class, `context` is an object of it: call its steps. Where those call
    the module's own `send` and `publish`, call them inside `with record(...) as called:`.
    """

    context: Any
    effects: Effects

    def __enter__(self) -> Recorded:
        self._block = entered(self.context)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    @property
    def sent(self) -> list[Message]:
        """The commands that were sent, delayed ones too, in order."""
        return self._asked("send")

    @property
    def published(self) -> list[Message]:
        """The events that were published, in order."""
        return self._asked("publish")

    @property
    def replied(self) -> list[Message]:
        """The replies, in order."""
        return self._asked("reply")

    @property
    def noted(self) -> list[Message]:
        """The commands that would undo, in order."""
        return self._asked("compensate_with")

    @property
    def delays(self) -> dict[type[Message], timedelta | datetime | None]:
        """When what was sent is due, by the message's class."""
        return {
            type(message): terms.delay or terms.at for _verb, message, terms in self.effects.asked
        }

    @property
    def cancelled(self) -> set[str]:
        """The stored names of the messages that were cancelled."""
        return self.effects.cancelled

    @property
    def completed(self) -> bool:
        return self.effects.ending == Lifecycle.COMPLETED

    @property
    def compensating(self) -> bool:
        return self.effects.ending == Lifecycle.COMPENSATING

    @property
    def discarded(self) -> bool:
        return self.effects.discarded

    def _asked(self, verb: str) -> list[Message]:
        return [message for asked, message, _terms in self.effects.asked if asked == verb]


def record(
    workflow: Any = None,
    state: WorkflowState | None = None,
    *,
    attempt: int = 1,
    attributes: dict[str, Any] | None = None,
    sticky_attributes: dict[str, Any] | None = None,
) -> Recorded:
    """A context that records, for calling a step of this workflow, or a plain handler.

    `workflow` is its class or its `define_workflow`, `state` an instance that need not be saved;
    without them the context is a plain handler's. No database is touched, and a reply always has
    somebody to go to.
    """
    delivery = delivery_with(attempt, attributes, sticky_attributes)
    effects = Effects()
    context: Context
    if workflow is None:
        context = HandlerContext(delivery, Origin(), effects)
    else:
        definition = definition_of(workflow)
        state = state if state is not None else definition.state()
        context = definition.context_class(delivery, Origin(), effects, state, definition)
    cast("Any", context).reply = partial(_record_reply, effects)
    return Recorded(context, effects)


def failure_of(
    command: Command, *, error: str = "", attempts: int = 1, losses: int = 0
) -> CommandFailed:
    """What a step `@on_failure(...)` is called with, besides the command; or for a `Scenario`."""
    return CommandFailed(
        command=command.stored_name(),
        body=to_json(command),
        delivery_id=uuid4(),
        handler="",
        error=error,
        attempts=attempts,
        losses=losses,
    )


def end_of(child: Any, *, outcome: Outcome = "completed") -> WorkflowEnded:
    """What a step `@when_completed(child)` is called with; or for a `Scenario` of the parent."""
    state = state_model(child)
    return WorkflowEnded(
        workflow=state.workflow_name or state._meta.label, instance_id=uuid4(), outcome=outcome
    )


def delivery_with(
    attempt: int = 1,
    attributes: dict[str, Any] | None = None,
    sticky_attributes: dict[str, Any] | None = None,
) -> Delivery:
    """A delivery that is nowhere stored."""
    return Delivery(
        message_id=uuid4(),
        correlation_id=uuid4(),
        attempts=attempt - 1,
        attributes=attributes or {},
        sticky_attributes=sticky_attributes or {},
    )


def definition_of(workflow: Any) -> WorkflowDefinition:
    """The declaration of the workflow. Raises `NotDeclared` outside the registry it is in."""
    state = state_model(workflow)
    for definition in registry.current().workflows:
        if definition.state is state:
            return definition
    raise NotDeclared(
        f"No workflow on {state._meta.label} is declared now. Is it in a workflows.py of an "
        f"installed app, or inside the isolated_registry() of this test?"
    )


def _record_reply(effects: Effects, message: Message, **options: Any) -> UUID:
    effects.asked.append(("reply", message, Terms.of("reply", options)))
    return uuid4()
