"""A straight line: declared as a list, run as ordinary steps; in classes and in functions alike."""

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    WorkflowContext,
    define_workflow,
    handles,
    line,
    publish,
    registry,
    stage,
    when,
)
from django_workflows.errors import DeclarationError
from django_workflows.models import Lifecycle
from tests.delivering import deliver_due
from tests.models import Note, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry", "workflows")]


class Begun(Event):
    key: str = "k"
    total: int = 7


class Reserve(Command):
    key: str
    total: int


class Reserved(Event):
    seen: list[int]


class Release(Command):
    key: str


class Charge(Command):
    cents: int


class Charged(Event):
    pass


class Refund(Command):
    cents: int
    seats: list[int]


class Pack(Command):
    key: str


class Packed(Event):
    pass


class Asked(Event):
    key: str = "k"


class GivenUp(Event):
    key: str = "k"


STAGES = (
    stage(Reserve, Reserved, Release),
    stage(
        Charge,
        Charged,
        Refund,
        fill=lambda state: {"cents": state.total * 100},
        undo_fill=lambda state: {"cents": state.total * 100, "seats": state.seen},
    ),
    stage(Pack, Packed),
)


def as_class() -> None:
    class Straight(Workflow[TallyState]):
        process = line(Begun, *STAGES, once_per="key")

        @when(Asked, lookup="key")
        def ask(self, message: Asked) -> None:
            self.state.total += 1

        @when(GivenUp, lookup="key")
        def give_up(self, message: GivenUp) -> None:
            self.compensate()


def as_functions() -> None:
    workflow = define_workflow(TallyState)
    workflow.line(Begun, *STAGES, once_per="key")

    @workflow.when(Asked, lookup="key")
    def ask(message: Asked, state: TallyState, context: WorkflowContext[TallyState]) -> None:
        state.total += 1

    @workflow.when(GivenUp, lookup="key")
    def give_up(message: GivenUp, state: TallyState, context: WorkflowContext[TallyState]) -> None:
        context.compensate()


@pytest.fixture(params=[as_class, as_functions], autouse=True)
def _declared(request: pytest.FixtureRequest, own_registry: Any) -> None:
    request.param()


def work(fails: type[Command] | None = None, holds: type[Command] | None = None) -> None:
    """Handlers of the commands: each writes a row and answers, fails for good, or says nothing."""

    def handler(command: type[Command], answer: Event | None) -> Callable[..., None]:
        def handle(message: Any, context: HandlerContext) -> None:
            if command is fails:
                context.fail("it cannot be done")
            values = ", ".join(str(value) for value in message.model_dump().values())
            Note.objects.create(text=f"{command.__name__} {values}")
            if answer and command is not holds:
                context.reply(answer)

        return handle

    for command, answer in (
        (Reserve, Reserved(seen=[11, 12])),
        (Release, None),
        (Charge, Charged()),
        (Refund, None),
        (Pack, Packed()),
    ):
        handles(command, name=f"tests.{command.__name__}")(handler(command, answer))


def done() -> list[str]:
    return [note.text for note in Note.objects.order_by("pk")]


def test_a_line_runs_its_stages_in_order_and_completes() -> None:
    """Its commands are filled from the state, and what is answered is kept in the state."""
    work()

    publish(Begun())
    deliver_due()

    instance = TallyState.objects.get()
    assert done() == ["Reserve k, 7", "Charge 700", "Pack k"]
    assert (instance.lifecycle, instance.key, instance.seen) == ("completed", "k", [11, 12])


@pytest.mark.parametrize(
    ("fails", "happens"),
    [
        (Reserve, []),
        (Charge, ["Reserve k, 7", "Release k"]),
        (Pack, ["Reserve k, 7", "Charge 700", "Refund 700, [11, 12]", "Release k"]),
    ],
)
def test_a_stage_that_fails_undoes_those_before_it(
    fails: type[Command], happens: list[str]
) -> None:
    work(fails=fails)

    publish(Begun())
    deliver_due()

    assert done() == happens
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED


def test_a_line_starts_once_per_key() -> None:
    work()

    publish(Begun())
    publish(Begun())
    publish(Begun(key="another"))
    deliver_due()

    assert sorted(TallyState.objects.values_list("key", flat=True)) == ["another", "k"]
    assert len(done()) == 6


def test_steps_by_hand_work_on_an_instance_of_a_line() -> None:
    work(holds=Reserve)
    publish(Begun())
    deliver_due()

    publish(Asked())
    deliver_due()

    instance = TallyState.objects.get()
    assert (instance.total, instance.lifecycle) == (8, Lifecycle.RUNNING)


def test_a_step_by_hand_can_have_the_line_undone() -> None:
    work(holds=Charge)
    publish(Begun())
    deliver_due()

    publish(GivenUp())
    deliver_due()

    assert done() == ["Reserve k, 7", "Charge 700", "Release k"]
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED


def test_list_workflows_shows_the_steps_of_a_line() -> None:
    work()
    out = StringIO()

    call_command("list_workflows", json=True, stdout=out)

    [workflow] = json.loads(out.getvalue())["workflows"]
    steps = [step["step"] for step in workflow["steps"]]
    assert sorted(steps) == [
        "after_charge",
        "after_pack",
        "after_reserve",
        "ask",
        "give_up",
        "start_begun",
        "undo_after_charge",
        "undo_after_pack",
        "undo_after_reserve",
    ]


def test_list_workflows_says_in_words_what_the_steps_of_a_line_are_for() -> None:
    work()
    out = StringIO()

    call_command("list_workflows", stdout=out)

    words = [line.split() for line in out.getvalue().splitlines()]
    assert ["tests.Charged", "after_charge", "@when(Charged)", "by", "workflow", "id"] in words
    assert ["undo_after_charge", "@on_failure(Charge)"] in [row[1:3] for row in words]
    assert ["tests.Begun", "start_begun", "@started_by(Begun)", "once", "per", "key"] in words


def test_a_line_passes_the_checks() -> None:
    work()

    call_command("check", stdout=StringIO())


@pytest.fixture
def _nothing_declared(own_registry: Any) -> None:
    own_registry.recipients.clear()
    own_registry.changed()


@pytest.mark.usefixtures("_nothing_declared")
def test_a_subclass_may_replace_the_line_of_its_base() -> None:
    class Straight(Workflow[TallyState]):
        process = line(Begun, *STAGES, once_per="key")

    class Shorter(Straight):
        process = line(Begun, stage(Pack, Packed), once_per="key")

    definition = next(w for w in registry.current().workflows if w.context_class is Shorter)

    assert [step.name for step in definition.steps] == [
        "start_begun",
        "after_pack",
        "undo_after_pack",
    ]


def test_a_line_without_stages_is_refused() -> None:
    with pytest.raises(DeclarationError, match="Begun has no stages"):
        line(Begun)
