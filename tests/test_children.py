"""Workflows that start others: the children's ends and answers reach the parent that asked."""

from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from django_workflows import (
    Command,
    Event,
    Workflow,
    WorkflowEnded,
    cancel_instance,
    define_workflow,
    handles,
    publish,
    send,
    started_by,
    when,
    when_completed,
)
from django_workflows.dispatch import deliver
from django_workflows.models import Delivery, Status
from tests.delivering import statuses_of
from tests.models import InvoiceState, ParcelState, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("isolated_registry")]


class Ordered(Event):
    number: int = 1
    children: int = 1


class CheckCredit(Command):
    number: int


class CreditChecked(Event):
    number: int


class AskBureau(Command):
    number: int


class BureauAnswered(Event):
    number: int


class Continue(Command):
    """A step of the child's own, later."""


class Search(Command):
    """A step of the grandchild's own, later."""


class Undo(Command):
    pass


class EndOfChild:
    """Declares a parent that starts children, and a child that ends as it is told to."""

    def __init__(self, end: Any, child_is_a_class: bool = True) -> None:
        self.told: list[tuple[int, WorkflowEnded]] = []
        child = self.declare_class(end) if child_is_a_class else self.declare_functions(end)
        told = self.told

        class Parents(Workflow[ParcelState]):
            @started_by(Ordered)
            def order(self, message: Ordered) -> None:
                self.state.number = message.number
                for number in range(message.children):
                    self.send(CheckCredit(number=number))

            @when_completed(child)
            def checked(self, ended: WorkflowEnded) -> None:
                told.append((self.state.number, ended))
                self.state.seen.append(ended.outcome)

    @staticmethod
    def declare_class(end: Any) -> Any:
        class Checks(Workflow[InvoiceState]):
            @started_by(CheckCredit)
            def begin(self, message: CheckCredit) -> None:
                self.send(Continue())

            @when(Continue)
            def go_on(self, message: Continue) -> None:
                end(self)

        return Checks

    @staticmethod
    def declare_functions(end: Any) -> Any:
        checks = define_workflow(InvoiceState)

        @checks.started_by(CheckCredit)
        def begin(message: CheckCredit, state: InvoiceState, context: Any) -> None:
            context.send(Continue())

        @checks.when(Continue)
        def go_on(message: Continue, state: InvoiceState, context: Any) -> None:
            end(context)

        return checks


# The end of a child


@pytest.mark.parametrize("child_is_a_class", [True, False])
def test_a_parent_is_told_when_its_child_has_completed(
    workflows: ModuleType, child_is_a_class: bool
) -> None:
    """F45: with its outcome and its id."""
    case = EndOfChild(lambda child: child.complete(), child_is_a_class)

    publish(Ordered(number=4))
    workflows.run_until_idle()

    child = InvoiceState.objects.get()
    assert [number for number, _ended in case.told] == [4]
    assert case.told[0][1] == WorkflowEnded(
        workflow="tests.InvoiceState", instance_id=child.pk, outcome="completed"
    )
    assert (child.starter_workflow, child.starter_id) == (
        "tests.ParcelState",
        ParcelState.objects.get().pk,
    )


def test_a_parent_is_told_of_each_of_its_children_and_of_no_others(workflows: ModuleType) -> None:
    """F45: each once."""
    case = EndOfChild(lambda child: child.complete())

    publish(Ordered(number=1, children=3), Ordered(number=2, children=2))
    send(CheckCredit(number=9))  # a child of nobody
    workflows.run_until_idle()

    per_parent = {
        parent.number: set(
            InvoiceState.objects.filter(starter_id=parent.pk).values_list("pk", flat=True)
        )
        for parent in ParcelState.objects.all()
    }
    told: dict[int, list[Any]] = {1: [], 2: []}
    for number, ended in case.told:
        told[number].append(ended.instance_id)
    assert (len(told[1]), len(told[2])) == (3, 2)
    assert {number: set(ids) for number, ids in told.items()} == per_parent


def test_a_parent_is_told_that_its_child_was_compensated(workflows: ModuleType) -> None:
    """F45: when the undoing is over, and not before."""

    def undo(child: Any) -> None:
        child.compensate_with(Undo())
        child.compensate()

    case = EndOfChild(undo)
    seen_by_undo = []

    @handles(Undo, name="undo")
    def undone(message: Undo, context: Any) -> None:
        seen_by_undo.append(len(case.told))

    publish(Ordered())
    workflows.run_until_idle()

    assert seen_by_undo == [0]
    assert [ended.outcome for _number, ended in case.told] == ["compensated"]


def test_a_parent_is_told_that_its_child_had_nothing_to_undo(workflows: ModuleType) -> None:
    case = EndOfChild(lambda child: child.compensate())

    publish(Ordered())
    workflows.run_until_idle()

    assert [ended.outcome for _number, ended in case.told] == ["compensated"]


def test_a_parent_is_told_that_its_child_was_cancelled(workflows: ModuleType) -> None:
    case = EndOfChild(lambda child: child.send(Continue(), delay=timedelta(days=1)))
    publish(Ordered())
    workflows.run_until_idle()

    cancel_instance(InvoiceState.objects.get())
    workflows.run_until_idle()

    assert [ended.outcome for _number, ended in case.told] == ["cancelled"]


def test_a_child_that_ends_in_its_first_step_tells_its_parent(workflows: ModuleType) -> None:
    """D33 and F45 together."""
    checks = define_workflow(InvoiceState)

    @checks.started_by(CheckCredit)
    def begin(message: CheckCredit, state: InvoiceState, context: Any) -> None:
        context.complete()

    told = []
    parents = define_workflow(ParcelState)

    @parents.started_by(Ordered)
    def order(message: Ordered, state: ParcelState, context: Any) -> None:
        context.send(CheckCredit(number=1))

    @parents.when_completed(InvoiceState)
    def checked(ended: WorkflowEnded, state: ParcelState, context: Any) -> None:
        told.append(ended.outcome)

    publish(Ordered())
    workflows.run_until_idle()

    assert told == ["completed"]


def test_a_step_for_one_child_is_not_run_for_another(workflows: ModuleType) -> None:
    for state, command in ((InvoiceState, CheckCredit), (TallyState, AskBureau)):
        child = define_workflow(state)
        child.started_by(command)(_completes)
    told = []

    class Parents(Workflow[ParcelState]):
        @started_by(Ordered)
        def order(self, message: Ordered) -> None:
            self.send(CheckCredit(number=1), AskBureau(number=1))

        @when_completed(InvoiceState)
        def checked(self, ended: WorkflowEnded) -> None:
            told.append(("checked", ended.workflow))

        @when_completed(TallyState)
        def answered(self, ended: WorkflowEnded) -> None:
            told.append(("answered", ended.workflow))

    publish(Ordered())
    workflows.run_until_idle()

    assert sorted(told) == [("answered", "tests.TallyState"), ("checked", "tests.InvoiceState")]


def test_a_parent_without_a_step_for_it_is_sent_nothing(workflows: ModuleType) -> None:
    checks = define_workflow(InvoiceState)
    checks.started_by(CheckCredit)(_completes)
    parents = define_workflow(ParcelState)

    @parents.started_by(Ordered)
    def order(message: Ordered, state: ParcelState, context: Any) -> None:
        context.send(CheckCredit(number=1))

    publish(Ordered())
    workflows.run_until_idle()

    assert InvoiceState.objects.get().lifecycle == "completed"
    assert statuses_of(WorkflowEnded) == []


def test_a_parent_that_has_ended_before_its_child_is_not_told(workflows: ModuleType) -> None:
    case = EndOfChild(lambda child: child.complete())
    publish(Ordered())
    for delivery in Delivery.objects.all():
        deliver(delivery.pk)

    cancel_instance(ParcelState.objects.get())
    workflows.run_until_idle()

    assert InvoiceState.objects.get().lifecycle == "completed"
    assert (case.told, statuses_of(WorkflowEnded)) == ([], [Status.IGNORED])


# Answers from children, and from theirs


def asks_a_bureau(later: bool) -> None:
    """Three workflows, each of which asks the next; `later` has each answer in a later step."""

    class Parents(Workflow[ParcelState]):
        @started_by(Ordered)
        def order(self, message: Ordered) -> None:
            self.state.number = message.number
            self.send(CheckCredit(number=message.number))

        @when(CreditChecked)
        def checked(self, message: CreditChecked) -> None:
            self.state.seen.append(message.number)

    class Checks(Workflow[InvoiceState]):
        @started_by(CheckCredit)
        def begin(self, message: CheckCredit) -> None:
            self.send(AskBureau(number=message.number + 10))

        @when(BureauAnswered)
        def answered(self, message: BureauAnswered) -> None:
            self.state.seen.append(message.number)
            if later:
                self.send(Continue())
            else:
                self.reply(CreditChecked(number=message.number + 100))

        @when(Continue)
        def go_on(self, message: Continue) -> None:
            self.reply(CreditChecked(number=self.state.seen[0] + 100))

    class Bureaus(Workflow[TallyState]):
        @started_by(AskBureau)
        def begin(self, message: AskBureau) -> None:
            self.state.key = str(message.number)
            if later:
                self.send(Search(), delay=timedelta(hours=1))
            else:
                self.reply(BureauAnswered(number=message.number))

        @when(Search)
        def go_on(self, message: Search) -> None:
            self.reply(BureauAnswered(number=int(self.state.key)))


@pytest.mark.parametrize("later", [False, True])
def test_answers_find_their_way_through_three_workflows(workflows: ModuleType, later: bool) -> None:
    """F43: a workflow's answer to who asked it is no question, whoever it came from."""
    asks_a_bureau(later)

    publish(Ordered(number=1), Ordered(number=2))
    workflows.advance(timedelta(hours=2))

    assert dict(ParcelState.objects.values_list("number", "seen")) == {1: [111], 2: [112]}
    assert workflows.failed() == []


class Climb(Command):
    name: str
    height: int


class Climbed(Event):
    path: str


def test_answers_find_their_way_through_instances_of_one_workflow(workflows: ModuleType) -> None:
    """F43: each level is an instance of the same workflow, which has a step for the answer."""

    class Levels(Workflow[TallyState]):
        @started_by(Climb)
        def climb(self, message: Climb) -> None:
            self.state.key = f"{message.name}{message.height}"
            if message.height:
                self.send(Climb(name=message.name, height=message.height - 1))
            else:
                self.reply(Climbed(path=self.state.key))

        @when(Climbed)
        def climbed(self, message: Climbed) -> None:
            self.state.seen.append(message.path)
            if self.state.starter_id:
                self.reply(Climbed(path=f"{message.path} {self.state.key}"))

    send(Climb(name="a", height=3), Climb(name="b", height=1))
    workflows.run_until_idle()

    assert workflows.failed() == []
    assert dict(TallyState.objects.values_list("key", "seen")) == {
        "a3": ["a0 a1 a2"],
        "a2": ["a0 a1"],
        "a1": ["a0"],
        "a0": [],
        "b1": ["b0"],
        "b0": [],
    }


def _completes(message: Any, state: Any, context: Any) -> None:
    context.complete()
