"""Processes that wait, ask, join and are told, for workers of other processes."""

from datetime import timedelta
from typing import Any

from django.utils import timezone

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    HandlerContext,
    Workflow,
    WorkflowEnded,
    handles,
    on_failure,
    started_by,
    when,
    when_all,
    when_completed,
)
from tests.models import InvoiceState, Note, ParcelState, TallyState
from tests.processes import workflow_settings


class Ring(Command, name="patient.Ring"):
    text: str


class Begun(Event, name="patient.Begun"):
    key: str
    questions: int


class Ask(Command, name="patient.Ask"):
    number: int


class Think(Command, name="patient.Think"):
    """What the child sends itself."""


class Answer(Event, name="patient.Answer"):
    number: int


class Break(Command, name="patient.Break"):
    pass


class Noted(Event, name="patient.Noted"):
    """For the parent of this key, which may not be there yet."""

    key: str


class ParcelPosted(Event, name="patient.ParcelPosted"):
    number: int


class ParcelArrived(Event, name="patient.ParcelArrived"):
    number: int


class ParcelOverdue(Command, name="patient.ParcelOverdue"):
    pass


def patient_env(**settings: Any) -> dict[str, str]:
    """The environment of workers that have these processes."""
    return {"DJANGO_SETTINGS_MODULE": "tests.patient.settings", **workflow_settings(**settings)}


def declare() -> None:
    class Parents(Workflow[TallyState]):
        @started_by(Begun, once_per="key")
        def begin(self, message: Begun) -> None:
            self.state.total = message.questions
            asked = [Ask(number=number) for number in range(message.questions)]
            self.send(*asked, sticky_attributes={"family": message.key})
            self.send(Break())

        @when_all(Answer, count="total")
        def answered(self, answers: list[Answer]) -> None:
            self.state.seen = sorted(answer.number for answer in answers)

        @when_completed(InvoiceState)
        def child_ended(self, ended: WorkflowEnded) -> None:
            Note.objects.create(text=f"child of {self.state.key} {ended.outcome}")

        @on_failure(Break)
        def broken(self, command: Break, failure: CommandFailed) -> None:
            Note.objects.create(text=f"{self.state.key} told: {failure.error}")

        @when(Noted, lookup="key", if_missing="wait")
        def note(self, message: Noted) -> None:
            Note.objects.create(text=f"{self.state.key} noted")

    class Children(Workflow[InvoiceState]):
        @started_by(Ask)
        def ask(self, message: Ask) -> None:
            self.state.seen = [message.number, self.sticky_attributes["family"]]
            self.send(Think(), delay=timedelta(milliseconds=200))

        @when(Think)
        def answer(self, message: Think) -> None:
            number, family = self.state.seen
            assert self.sticky_attributes["family"] == family
            self.reply(Answer(number=number))
            self.complete()

    class Parcels(Workflow[ParcelState]):
        @started_by(ParcelPosted)
        def post(self, message: ParcelPosted) -> None:
            self.state.number = message.number
            self.send(ParcelOverdue(), delay=timedelta(seconds=2))

        @when(ParcelArrived, lookup="number")
        def arrive(self, message: ParcelArrived) -> None:
            self.state.seen.append("arrived")
            self.complete()

        @when(ParcelOverdue)
        def complain(self, message: ParcelOverdue) -> None:
            self.state.seen.append("overdue")
            self.complete()

    @handles(Break, name="patient.break", attempts=2, backoff=timedelta(milliseconds=100))
    def break_(message: Break, context: HandlerContext) -> None:
        raise ValueError(f"attempt {context.attempt}")

    @handles(Ring, name="patient.ring")
    def ring(message: Ring, context: HandlerContext) -> None:
        Note.objects.create(text=f"{message.text} {timezone.now().timestamp()}")
