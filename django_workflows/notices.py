"""What the engine itself tells an instance, as messages like any other."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from django_workflows.declarations import Notice, Step

Outcome = Literal["completed", "compensated", "cancelled"]


class CommandFailed(Notice):
    """A command that the instance sent has failed for good: for `@on_failure(TheCommand)`."""

    verb = "on_failure"
    parameters = ("command", "failure")

    command: str
    body: str
    delivery_id: UUID
    handler: str
    error: str
    attempts: int
    losses: int

    def is_about(self, step: Step) -> bool:
        return self.command in step.about.stored_names()


class WorkflowEnded(Notice):
    """An instance that this one started has ended; for a step `@when_completed(TheChild)`."""

    verb = "when_completed"
    parameters = ("ended",)

    workflow: str
    instance_id: UUID
    outcome: Outcome

    def is_about(self, step: Step) -> bool:
        state = step.about
        return self.workflow in (state.workflow_name or state._meta.label, *state.workflow_aliases)


class JoinComplete(Notice):
    """All that a step `@when_all(...)` waits for has arrived."""

    verb = "when_all"
    parameters = ("messages",)

    step: str

    def is_about(self, step: Step) -> bool:
        return step.join is not None and self.step == step.name
