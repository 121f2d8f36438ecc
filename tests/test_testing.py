"""`django_workflows.testing`, used as a project would."""

import threading
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from django.test import TestCase

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    HandlerContext,
    Unrecoverable,
    Workflow,
    WorkflowEnded,
    attribute,
    clock,
    define_workflow,
    handles,
    on_failure,
    outbox,
    publish,
    send,
    started_by,
    when,
    when_all,
    when_completed,
)
from django_workflows.errors import (
    LookupMismatch,
    NoHandler,
    NotDeclared,
    WorkflowsError,
    WrongVerb,
)
from django_workflows.models import Delivery, Status
from django_workflows.testing import (
    Scenario,
    advance,
    end_of,
    failed,
    failure_of,
    isolated_registry,
    moved_clock,
    record,
    run_until_idle,
    sent,
)
from tests.models import InvoiceState, Note, ParcelState, TallyState

ORDER = UUID("00000000-0000-4000-8000-00000000000a")
HOUR = timedelta(hours=1)


class Opened(Event):
    key: str = "k"


class Counted(Event):
    key: str = "k"
    by: int = 1


class Answered(Event):
    number: int


class Announced(Event):
    key: str


class Charge(Command):
    amount: int = 5


class Refund(Command):
    amount: int = 5


class Overdue(Command):
    round: int = 1


class Reminded(Command):
    pass


class Done(Event):
    pass


class Tallies:
    """Declares a workflow that does one of everything, in either style."""

    @staticmethod
    def as_class() -> Any:
        class TallyWorkflow(Workflow[TallyState]):
            @started_by(Opened, once_per="key")
            def open(self, message: Opened) -> None:
                self.send(Charge(amount=7))
                self.send(Overdue(), delay=HOUR)
                self.compensate_with(Refund(amount=7))

            @when(Counted, lookup="key")
            def count(self, message: Counted) -> None:
                self.state.total += message.by
                self.publish(Announced(key=self.state.key))

            @when(Overdue)
            def remind(self, message: Overdue) -> None:
                self.state.seen.append(message.round)
                self.send_again(Overdue(round=message.round + 1), delay=HOUR)

            @when(Done)
            def finish(self, message: Done) -> None:
                self.cancel(Overdue)
                self.complete()

            @on_failure(Charge)
            def not_charged(self, command: Charge, failure: CommandFailed) -> None:
                self.state.seen.append([command.amount, failure.error, failure.attempts])
                self.compensate()

        return TallyWorkflow

    @staticmethod
    def as_functions() -> Any:
        workflow = define_workflow(TallyState)

        @workflow.started_by(Opened, once_per="key")
        def open(message: Opened, state: TallyState, context: Any) -> None:
            context.send(Charge(amount=7))
            context.send(Overdue(), delay=HOUR)
            context.compensate_with(Refund(amount=7))

        @workflow.when(Counted, lookup="key")
        def count(message: Counted, state: TallyState, context: Any) -> None:
            state.total += message.by
            context.publish(Announced(key=state.key))

        @workflow.when(Overdue)
        def remind(message: Overdue, state: TallyState, context: Any) -> None:
            state.seen.append(message.round)
            context.send_again(Overdue(round=message.round + 1), delay=HOUR)

        @workflow.when(Done)
        def finish(message: Done, state: TallyState, context: Any) -> None:
            context.cancel(Overdue)
            context.complete()

        @workflow.on_failure(Charge)
        def not_charged(
            command: Charge, failure: CommandFailed, state: TallyState, context: Any
        ) -> None:
            state.seen.append([command.amount, failure.error, failure.attempts])
            context.compensate()

        return workflow


@pytest.fixture(params=["class", "functions"])
def tallies(request: pytest.FixtureRequest, isolated_registry: object) -> Any:
    for command in (Charge, Refund):
        handles(command, name=command.__name__)(lambda message, context: None)
    return Tallies.as_class() if request.param == "class" else Tallies.as_functions()


def declare(*commands: type[Command]) -> None:
    """Lets these commands be sent."""
    for command in commands:
        handles(command, name=command.__name__)(lambda message, context: None)


# Recording: none of these tests may touch a database


def test_a_step_of_a_class_is_tested_by_calling_it(isolated_registry: object) -> None:
    declare(Charge, Refund)
    workflow, state = Tallies.as_class(), TallyState(key="k", total=2)

    called = record(workflow, state)
    called.context.open(Opened())
    counted = record(workflow, state)
    counted.context.count(Counted(by=3))

    assert called.sent == [Charge(amount=7), Overdue()]
    assert called.delays == {Charge: None, Overdue: HOUR, Refund: None}
    assert called.noted == [Refund(amount=7)]
    assert (called.completed, called.compensating, called.discarded) == (False, False, False)
    assert (counted.published, state.total) == ([Announced(key="k")], 5)


def test_a_step_that_is_a_function_is_tested_by_calling_it(isolated_registry: object) -> None:
    workflow = define_workflow(TallyState)

    @workflow.when(Done)
    def finish(message: Done, state: TallyState, context: Any) -> None:
        state.total = 9
        context.cancel(Overdue)
        context.complete()

    state = TallyState()

    called = record(workflow)
    finish(Done(), state, called.context)

    assert (called.completed, called.cancelled, state.total) == (True, {"tests.Overdue"}, 9)


def test_a_handler_is_tested_by_calling_it(isolated_registry: object) -> None:
    @handles(Charge, name="charge")
    def charge(message: Charge, context: HandlerContext) -> None:
        context.publish(Announced(key=f"{context.attempt} {context.attributes['who']}"))
        context.reply(Done())

    called = record(attempt=3, attributes={"who": "Ann"})
    charge(Charge(), called.context)

    assert called.published == [Announced(key="3 Ann")]
    assert called.replied == [Done()]


def test_what_a_step_sends_from_deep_inside_is_recorded_in_a_block(
    isolated_registry: object,
) -> None:
    """The module's own `send`, which knows the context that is current."""
    declare(Refund)

    def deep_inside() -> None:
        send(Refund())
        publish(Done())

    with record() as called:
        deep_inside()

    assert (called.sent, called.published) == ([Refund()], [Done()])


def test_what_a_step_has_cancelled_again_is_not_among_what_it_sent(
    isolated_registry: object,
) -> None:
    """E39, the engine's rule: it never leaves."""
    declare(Charge, Refund)
    called = record(Tallies.as_class(), TallyState())

    called.context.send(Overdue(), Charge())
    called.context.cancel(Overdue)

    assert called.sent == [Charge()]


def test_steps_for_notices_of_the_engine_are_called_with_what_it_would_send(
    isolated_registry: object,
) -> None:
    declare(Charge, Refund)
    state = TallyState()

    called = record(Tallies.as_class(), state)
    failure = failure_of(Charge(amount=3), error="no money", attempts=4)
    called.context.not_charged(Charge(amount=3), failure)

    assert state.seen == [[3, "no money", 4]]
    assert called.compensating


def test_a_recorded_context_refuses_what_the_engine_refuses(isolated_registry: object) -> None:
    context = record().context

    with pytest.raises(WrongVerb):
        context.send(Done())
    with pytest.raises(NoHandler):
        context.send(Charge())
    with pytest.raises(Unrecoverable, match="stolen"):
        context.fail("stolen")


def test_a_workflow_that_is_not_declared_is_an_error_that_says_so(
    isolated_registry: object,
) -> None:
    with pytest.raises(NotDeclared, match="No workflow on"):
        Scenario(TallyState)


# Scenarios: nor may these


def test_a_scenario_starts_with_a_message(tallies: Any) -> None:
    scenario = Scenario(tallies)

    then = scenario.when(Opened(key="a"))

    assert then.sent == [Charge(amount=7), Overdue()]
    assert then is scenario.then
    assert (scenario.state.key, scenario.lifecycle) == ("a", "running")
    assert scenario.noted == [Refund(amount=7)]


def test_a_scenario_continues_a_given_state(tallies: Any) -> None:
    given = TallyState(key="a", total=2)

    scenario = Scenario(tallies, given)
    then = scenario.when(Counted(key="a", by=3))

    assert then.published == [Announced(key="a")]
    assert (scenario.state, given.total) == (given, 5)


def test_timeouts_fall_due_as_the_clock_of_the_scenario_moves_on(tallies: Any) -> None:
    scenario = Scenario(tallies, now=datetime(2030, 1, 1, tzinfo=UTC))
    scenario.when(Opened())

    early = scenario.advance(timedelta(minutes=59))
    [then] = scenario.advance(timedelta(minutes=2))
    more = scenario.advance(timedelta(hours=2))

    assert (early, then.sent, len(more)) == ([], [Overdue(round=2)], 2)
    assert scenario.state.seen == [1, 2, 3]
    assert scenario.now == datetime(2030, 1, 1, 3, 1, tzinfo=UTC)


def test_a_time_that_has_passed_falls_due_at_once(isolated_registry: object) -> None:
    workflow = define_workflow(TallyState)

    @workflow.started_by(Opened)
    def open(message: Opened, state: TallyState, context: Any) -> None:
        context.send(Overdue(round=2))
        context.send(Overdue(round=1), at=datetime(2001, 1, 1, tzinfo=UTC))

    @workflow.when(Overdue)
    def remind(message: Overdue, state: TallyState, context: Any) -> None:
        state.seen.append(message.round)

    scenario = Scenario(workflow)
    scenario.when(Opened())
    scenario.advance(timedelta(0))

    assert scenario.state.seen == [1, 2]


def test_after_its_end_a_scenario_ignores_messages_and_timeouts(tallies: Any) -> None:
    """D32 and E39."""
    scenario = Scenario(tallies)
    scenario.when(Opened())
    ending = scenario.when(Done())

    late = scenario.when(Counted())
    delivered = scenario.advance(timedelta(days=1))

    assert (ending.completed, scenario.lifecycle) == (True, "completed")
    assert (late.published, delivered, scenario.state.total) == ([], [], 0)


def test_a_scenario_without_an_instance_ignores_what_does_not_start_one(tallies: Any) -> None:
    """D31."""
    scenario = Scenario(tallies)

    then = scenario.when(Counted())

    assert (then.published, scenario.state, scenario.lifecycle) == ([], None, None)


def test_a_message_whose_lookup_leads_elsewhere_is_ignored(tallies: Any) -> None:
    """C22."""
    scenario = Scenario(tallies, TallyState(key="a"))

    scenario.when(Counted(key="b"))
    scenario.when(Counted(key=""))

    assert scenario.state.total == 0


def test_a_message_that_the_workflow_has_no_step_for_is_a_mistake_of_the_test(tallies: Any) -> None:
    scenario = Scenario(tallies)

    with pytest.raises(AssertionError, match="has no step for Announced"):
        scenario.when(Announced(key="a"))


def test_start_or_continue_by_one_lookup(isolated_registry: object) -> None:
    """C28: once it has begun, the same message continues."""

    class Parcels(Workflow[ParcelState]):
        @started_by(Opened, once_per="customer", lookup="key")
        def open(self, message: Opened) -> None:
            self.state.seen.append("opened")

        @when(Opened, lookup="key", maps_to="customer")
        def open_again(self, message: Opened) -> None:
            self.state.seen.append("again")

    scenario = Scenario(Parcels)
    for key in ("Ann", "Ann", "Bea"):
        scenario.when(Opened(key=key))

    assert (scenario.state.customer, scenario.state.seen) == ("Ann", ["opened", "again"])


def test_the_key_of_a_scenario_is_converted_by_its_field(isolated_registry: object) -> None:
    """C24: and a value that the field cannot hold is the engine's error."""
    workflow = define_workflow(ParcelState)

    @workflow.started_by(Opened, once_per="posted_on", lookup=attribute("day"))
    def open(message: Opened, state: ParcelState, context: Any) -> None: ...

    scenario, other, third = Scenario(workflow), Scenario(workflow), Scenario(workflow)

    scenario.when(Opened(), sticky_attributes={"day": "2030-02-01"})
    with pytest.raises(LookupMismatch, match="posted_on"):
        other.when(Opened(), attributes={"day": "tomorrow"})
    with pytest.raises(LookupMismatch, match="has no value for it"):
        third.when(Opened())

    assert scenario.state.posted_on == date(2030, 2, 1)


def test_a_step_that_raises_leaves_the_scenario_as_it_was(isolated_registry: object) -> None:
    """H51: the failed attempt left no state; the next one may succeed."""
    workflow = define_workflow(TallyState)

    @workflow.when(Counted)
    def count(message: Counted, state: TallyState, context: Any) -> None:
        state.total += message.by
        state.seen.append(context.attempt)
        context.send(Overdue(), delay=HOUR)
        if context.attempt == 1:
            raise ValueError("no")

    @workflow.when(Overdue)
    def remind(message: Overdue, state: TallyState, context: Any) -> None: ...

    scenario = Scenario(workflow, TallyState(key="a"))

    with pytest.raises(ValueError, match="no"):
        scenario.when(Counted())
    after_the_failure = scenario.state.total, list(scenario.state.seen), list(scenario.waiting)
    scenario.when(Counted(), attempt=2)

    assert after_the_failure == (0, [], [])
    assert (scenario.state.total, scenario.state.seen) == (1, [2])


def test_a_step_that_discards_changes_nothing_and_what_it_sent_leaves(
    isolated_registry: object,
) -> None:
    """D34."""
    workflow = define_workflow(TallyState)

    @workflow.when(Counted)
    def count(message: Counted, state: TallyState, context: Any) -> None:
        state.total += message.by
        context.publish(Announced(key=state.key))
        context.discard()

    scenario = Scenario(workflow, TallyState(key="a"))
    then = scenario.when(Counted())

    assert (then.discarded, then.published) == (True, [Announced(key="a")])
    assert scenario.state.total == 0


def test_a_start_that_is_discarded_leaves_a_scenario_without_an_instance(
    isolated_registry: object,
) -> None:
    """D34."""
    workflow = define_workflow(TallyState)

    @workflow.started_by(Opened)
    def open(message: Opened, state: TallyState, context: Any) -> None:
        context.discard()

    scenario = Scenario(workflow)
    scenario.when(Opened())

    assert (scenario.state, scenario.then.discarded) == (None, True)


def test_a_step_may_not_set_what_the_engine_alone_writes(isolated_registry: object) -> None:
    workflow = define_workflow(TallyState)

    @workflow.when(Counted)
    def count(message: Counted, state: TallyState, context: Any) -> None:
        state.lifecycle = "completed"

    scenario = Scenario(workflow, TallyState(key="a"))

    with pytest.raises(WorkflowsError, match="which the engine alone writes"):
        scenario.when(Counted())


def test_a_failed_command_is_played_as_a_notice(tallies: Any) -> None:
    """G50."""
    scenario = Scenario(tallies)
    scenario.when(Opened())

    then = scenario.when(failure_of(Charge(amount=7), error="no money"))

    assert then.compensating
    assert (scenario.state.seen, scenario.lifecycle) == ([[7, "no money", 1]], "compensating")
    assert scenario.noted == [Refund(amount=7)]


def test_a_scenario_that_has_nothing_to_undo_ends_compensated(isolated_registry: object) -> None:
    workflow = define_workflow(TallyState)

    @workflow.when(Done)
    def undo(message: Done, state: TallyState, context: Any) -> None:
        context.compensate()

    scenario = Scenario(workflow, TallyState(key="a"))
    scenario.when(Done())

    assert scenario.lifecycle == "compensated"


def test_the_end_of_a_child_is_played_as_a_notice(isolated_registry: object) -> None:
    """F45: for the step of that child alone."""
    for state in (InvoiceState, ParcelState):
        define_workflow(state)
    outcomes = []

    class Parents(Workflow[TallyState]):
        @when_completed(InvoiceState)
        def paid(self, ended: WorkflowEnded) -> None:
            outcomes.append(ended.outcome)
            self.complete()

    scenario = Scenario(Parents, TallyState(key="a"))
    with pytest.raises(AssertionError, match="no step for WorkflowEnded"):
        scenario.when(end_of(ParcelState))
    scenario.when(end_of(InvoiceState, outcome="cancelled"))

    assert (outcomes, scenario.lifecycle) == (["cancelled"], "completed")


def test_a_join_runs_with_the_message_that_completes_it(isolated_registry: object) -> None:
    """F46: once, with those that are distinct, and ignores what comes later."""
    ran = []

    class Joins(Workflow[TallyState]):
        @when_all(Answered, count="total", distinct="number")
        def all_there(self, messages: list[Answered]) -> None:
            ran.append([message.number for message in messages])
            self.publish(Announced(key=self.state.key))

    scenario = Scenario(Joins, TallyState(key="a", total=2))
    published = [scenario.when(Answered(number=n)).published for n in (1, 1, 2, 3)]

    assert ran == [[1, 2]]
    assert published == [[], [], [Announced(key="a")], []]


def test_a_join_that_a_step_completes_falls_due_at_once(isolated_registry: object) -> None:
    ran = []

    class Joins(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def open(self, message: Opened) -> None:
            self.state.total = 2

        @when(Counted, lookup="key")
        def count(self, message: Counted) -> None:
            self.state.total -= message.by

        @when_all(Answered, count="total")
        def all_there(self, messages: list[Answered]) -> None:
            ran.append(messages)

    scenario = Scenario(Joins)
    for message in (Opened(), Answered(number=1), Counted(by=1)):
        scenario.when(message)
    before = list(ran)
    scenario.advance(timedelta(0))

    assert (before, ran) == ([], [[Answered(number=1)]])


# With a database


class InAPlainTestCase(TestCase):
    """No pytest, no broker, no threads: the test's own transaction, rolled back at its end."""

    def setUp(self) -> None:
        self.enterContext(isolated_registry())
        self.enterContext(moved_clock())
        declare(Charge, Refund)
        self.workflow = Tallies.as_class()
        self.threads = threading.active_count()

    def test_what_is_due_is_handled_and_what_that_leads_to(self) -> None:
        publish(Opened(key="a"))

        count = run_until_idle()

        assert count == 2
        assert TallyState.objects.get().key == "a"
        assert sent(Charge) == [Charge(amount=7)]
        assert threading.active_count() == self.threads

    def test_the_clock_is_moved_on_to_what_falls_due(self) -> None:
        publish(Opened(key="a"))

        counts = [advance(timedelta(minutes=59)), advance(timedelta(minutes=2))]

        assert counts == [2, 1]
        assert TallyState.objects.get().seen == [1]
        assert sent(Overdue) == [Overdue(round=1), Overdue(round=2)]

    def test_every_test_begins_with_empty_tables_and_the_true_time(self) -> None:
        """Whichever order they run in: each of the others leaves rows and moves the clock."""
        assert Delivery.objects.count() == 0
        assert clock.offset == timedelta(0)
        publish(Opened(key="a"))
        advance(timedelta(days=1))

    def test_what_failed_is_there_to_be_asserted(self) -> None:
        @handles(Announced, name="announced", attempts=2, backoff=HOUR)
        def announced(message: Announced, context: HandlerContext) -> None:
            Note.objects.create(text="rolled back")
            raise ValueError("no")

        publish(Announced(key="a"))
        run_until_idle()
        first = [(delivery.status, delivery.attempts) for delivery in failed()]
        advance(2 * HOUR)
        last = [(delivery.status, delivery.attempts) for delivery in failed()]

        assert (first, last) == ([(Status.PENDING, 1)], [(Status.FAILED, 2)])
        assert Note.objects.count() == 0


@pytest.mark.usefixtures("isolated_registry")
def test_advance_handles_what_falls_due_in_its_order(workflows: ModuleType) -> None:
    """What one step sends may fall due before what has waited longer."""
    handled = []

    @handles(Overdue, name="overdue")
    def overdue(message: Overdue, context: HandlerContext) -> None:
        handled.append(message.round)
        if message.round == 1:
            context.send(Overdue(round=2), delay=timedelta(minutes=30))

    send(Overdue(round=3), delay=2 * HOUR)
    send(Overdue(round=1), delay=HOUR)
    count = workflows.advance(3 * HOUR)

    assert (count, handled) == (3, [1, 2, 3])


@pytest.mark.usefixtures("isolated_registry")
def test_advance_moves_the_clock_exactly_so_far(workflows: ModuleType) -> None:
    before = clock.local()
    handles(Reminded, name="reminded")(lambda message, context: None)
    send(Reminded(), delay=HOUR)

    workflows.advance(2 * HOUR)
    workflows.advance(HOUR)

    moved = clock.local() - before
    assert timedelta(hours=3) <= moved < timedelta(hours=3, minutes=1)


@pytest.mark.parametrize(
    ("drive", "arguments"), [("run_until_idle", ()), ("advance", (timedelta(days=9),))]
)
@pytest.mark.usefixtures("isolated_registry")
def test_messages_that_send_each_other_for_ever_reach_the_limit(
    workflows: ModuleType, drive: str, arguments: tuple[Any, ...]
) -> None:
    @handles(Reminded, name="reminded")
    def again(message: Reminded, context: HandlerContext) -> None:
        context.send(Reminded(), delay=HOUR if drive == "advance" else None)

    send(Reminded())

    with pytest.raises(AssertionError, match="12 deliveries were handled and there is more"):
        getattr(workflows, drive)(*arguments, limit=12)


@pytest.mark.usefixtures("isolated_registry")
def test_sent_has_each_message_once(workflows: ModuleType) -> None:
    """An event with two handlers is one message with two deliveries."""
    for name in ("one", "two"):
        handles(Announced, name=name)(lambda message, context: None)

    publish(Announced(key="a"), Announced(key="b"))

    assert workflows.sent(Announced) == [Announced(key="a"), Announced(key="b")]


@pytest.mark.usefixtures("isolated_registry")
def test_sent_has_an_undo_command_once_it_undoes(workflows: ModuleType) -> None:
    """And never, if the instance completes: until then it is a note."""
    declare(Refund)
    handles(Charge, name="charge", attempts=2, backoff=HOUR)(_fails)
    define_workflow_that_undoes_or_ends()

    publish(Opened(key="undoes"))
    workflows.run_until_idle()
    noted = workflows.sent(Refund)
    publish(Opened(key="ends"))
    workflows.run_until_idle()
    publish(Counted(key="ends"))
    workflows.advance(2 * HOUR)

    assert noted == []
    assert workflows.sent(Refund) == [Refund(amount=6)]


@pytest.mark.django_db
def test_the_clock_is_put_back_to_where_it_was() -> None:
    """Also when the block raises, and when it is in another one."""
    with moved_clock():
        advance(HOUR)
        outer = clock.offset
        with suppress(ZeroDivisionError), moved_clock():
            advance(HOUR)
            raise ZeroDivisionError
        between = clock.offset

    assert timedelta(minutes=59) < outer == between
    assert clock.offset == timedelta(0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("isolated_registry")
def test_nothing_is_handed_to_a_broker_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in a test whose transactions commit."""
    handed_over: list[Any] = []

    class Broker:
        hands_over = True

        def hand_over(self, queue: str, ids: Any) -> None:
            handed_over.extend(ids)

    monkeypatch.setattr(outbox, "transport", Broker())
    declare(Charge)

    with moved_clock():
        send(Charge())
    inside = list(handed_over)
    send(Charge())

    assert (inside, len(handed_over)) == ([], 1)


def define_workflow_that_undoes_or_ends() -> None:
    class TallyWorkflow(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def open(self, message: Opened) -> None:
            self.send(Charge())
            self.compensate_with(Refund(amount=len(message.key)))

        @when(Counted, lookup="key")
        def end(self, message: Counted) -> None:
            self.complete()

        @on_failure(Charge)
        def undo(self, command: Charge, failure: CommandFailed) -> None:
            self.compensate()


def _fails(message: Any, context: HandlerContext) -> None:
    raise ValueError("no")
