"""`@on_failure`: who sent a command that has failed for good is told, once, and can act."""

from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.db import connection

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    HandlerContext,
    Workflow,
    define_workflow,
    handles,
    on_failure,
    publish,
    send,
    started_by,
)
from django_workflows.dispatch import claim, deliver
from django_workflows.models import Delivery, Status
from django_workflows.relay import take
from tests.delivering import deliver_due, delivery_of, move_clock_on, statuses_of
from tests.models import Note, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("isolated_registry")]

MINUTE = timedelta(minutes=1)


class Opened(Event):
    key: str = "k"


class Counted(Event):
    key: str = "k"


class Charge(Command):
    amount: int = 5
    text: str = ""


class Ship(Command):
    pass


Told = list[tuple[Charge, CommandFailed]]


def charges(*, react: Callable[[Any], None] = lambda workflow: None, **message: Any) -> Told:
    """Declares a workflow that sends a command and a step for its failure; what that was told."""
    told: Told = []

    class Tallies(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def open(self, opened: Opened) -> None:
            self.send(Charge(**message))

        @on_failure(Charge, attempts=3, backoff=MINUTE)
        def not_charged(self, command: Charge, failure: CommandFailed) -> None:
            react(self)
            told.append((command, failure))
            self.state.total += 1

    return told


def test_the_sender_is_told_with_the_command_and_the_facts(workflows: ModuleType) -> None:
    """G50."""
    told = charges(amount=7)

    @handles(Charge, name="charge", attempts=2, backoff=MINUTE)
    def charge(message: Charge, context: HandlerContext) -> None:
        raise ValueError(f"no money, attempt {context.attempt}")

    publish(Opened(key="a"), Opened(key="b"))
    workflows.run_until_idle()
    before = len(told)
    workflows.advance(timedelta(hours=1))

    assert before == 0  # it was to be tried again
    assert len(told) == 2
    command, failure = told[0]
    failed = Delivery.objects.filter(status=Status.FAILED).order_by("pk")[0]
    assert command == Charge(amount=7)
    assert (failure.command, failure.handler) == ("tests.Charge", "charge")
    assert (failure.delivery_id, failure.attempts, failure.losses) == (failed.pk, 2, 0)
    assert failure.error == "ValueError: no money, attempt 2"
    assert list(TallyState.objects.values_list("total", flat=True)) == [1, 1]


def test_being_told_is_a_delivery_of_its_own(workflows: ModuleType) -> None:
    """G50: it has a place in the instance's timeline, after the command that failed."""
    charges()
    handles(Charge, name="charge", attempts=1)(_fails)

    publish(Opened())
    workflows.run_until_idle()

    notice, command = delivery_of(CommandFailed), delivery_of(Charge)
    assert (notice.status, notice.step) == (Status.HANDLED, "not_charged")
    assert notice.instance_id == TallyState.objects.get().pk
    assert notice.causation_id == command.message_id
    assert notice.correlation_id == command.correlation_id
    assert command.status == Status.FAILED  # visible, and replayable


def test_only_the_step_for_that_command_runs(workflows: ModuleType) -> None:
    told: list[Any] = []
    told_of_ship: list[Any] = []
    handles(Charge, name="charge")(lambda message, context: None)
    handles(Ship, name="ship", attempts=1)(_fails)
    workflow = define_workflow(TallyState)

    workflow.started_by(Counted, once_per="key")(_sends_both)

    @workflow.on_failure(Charge)
    def not_charged(command: Charge, failure: CommandFailed, state: Any, context: Any) -> None:
        told.append(command)

    @workflow.on_failure(Ship)
    def not_shipped(command: Ship, failure: CommandFailed, state: Any, context: Any) -> None:
        told_of_ship.append(command)

    publish(Counted(key="both"))
    workflows.run_until_idle()

    assert (told, told_of_ship) == ([], [Ship()])


def test_without_a_step_nothing_is_sent_and_the_failure_stays(workflows: ModuleType) -> None:
    handles(Charge, name="charge", attempts=1)(_fails)

    class Tallies(Workflow[TallyState]):
        @started_by(Opened)
        def open(self, message: Opened) -> None:
            self.send(Charge())

    publish(Opened())
    workflows.run_until_idle()

    assert statuses_of(CommandFailed) == []
    failed = delivery_of(Charge)
    assert failed.status == Status.FAILED
    assert failed.sender_instance_id == TallyState.objects.get().pk


def test_a_command_that_no_workflow_sent_tells_nobody(workflows: ModuleType) -> None:
    told = charges()
    handles(Charge, name="charge", attempts=1)(_fails)

    send(Charge())
    workflows.run_until_idle()

    assert (told, statuses_of(CommandFailed)) == ([], [])


def test_a_replay_that_fails_again_tells_again(workflows: ModuleType) -> None:
    """H52 and G50 together."""
    told = charges()
    handles(Charge, name="charge", attempts=1)(_fails)
    publish(Opened())
    workflows.run_until_idle()

    Delivery.objects.filter(status=Status.FAILED).replay()
    workflows.run_until_idle()

    assert len(told) == 2
    assert TallyState.objects.get().total == 2


def test_a_replay_that_succeeds_tells_nothing_more(workflows: ModuleType) -> None:
    told = charges()
    broken = [True]

    @handles(Charge, name="charge", attempts=1)
    def charge(message: Charge, context: HandlerContext) -> None:
        if broken:
            raise ValueError("no")

    publish(Opened())
    workflows.run_until_idle()
    broken.clear()
    Delivery.objects.filter(status=Status.FAILED).replay()
    workflows.run_until_idle()

    assert len(told) == 1
    assert statuses_of(Charge) == [Status.HANDLED]


def test_an_exception_in_the_step_that_is_told_is_retried_like_any_other(
    workflows: ModuleType,
) -> None:
    runs = []

    def react(workflow: Any) -> None:
        runs.append(workflow.attempt)
        if len(runs) < 3:
            raise ValueError("not yet")

    told = charges(react=react)
    handles(Charge, name="charge", attempts=1)(_fails)

    publish(Opened())
    workflows.advance(timedelta(hours=1))

    assert (runs, len(told)) == ([1, 2, 3], 1)
    assert TallyState.objects.get().total == 1


def test_a_step_that_is_told_and_fails_for_good_stays_visible_and_tells_nobody(
    workflows: ModuleType,
) -> None:
    charges(react=lambda workflow: workflow.fail("I cannot"))
    handles(Charge, name="charge", attempts=1)(_fails)

    publish(Opened())
    workflows.advance(timedelta(hours=1))

    assert statuses_of(CommandFailed) == [Status.FAILED]


def test_the_step_that_is_told_can_end_the_instance(workflows: ModuleType) -> None:
    """G50: and act."""
    charges(react=lambda workflow: workflow.complete())
    handles(Charge, name="charge", attempts=1)(_fails)

    publish(Opened())
    workflows.run_until_idle()

    assert TallyState.objects.get().lifecycle == "completed"


def test_an_instance_that_has_ended_meanwhile_is_not_told(workflows: ModuleType) -> None:
    told = charges()
    handles(Charge, name="charge", attempts=2, backoff=MINUTE)(_fails)
    publish(Opened())
    workflows.run_until_idle()

    TallyState.objects.update(lifecycle="cancelled", ended_at=TallyState().started_at)
    workflows.advance(timedelta(hours=1))

    assert told == []
    assert statuses_of(CommandFailed) == [Status.IGNORED]


def test_the_sender_is_told_when_the_command_cost_too_many_workers(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G50 by way of H55: given up by the relay, not by a handler."""
    settings.DJANGO_WORKFLOWS = {"LOSSES": 2, "LEASE": MINUTE, "BACKOFF_MAX": MINUTE}
    told = charges()
    handles(Charge, name="charge")(lambda message, context: None)
    publish(Opened())
    take_and_deliver_one()

    for _ in range(2):  # claimed by workers that are never heard of again
        assert claim(delivery_of(Charge).pk) is not None
        move_clock_on(monkeypatch, timedelta(hours=1))
        take("default", 10)
    deliver_due()

    (command, failure), *more = told
    assert more == []
    assert (failure.losses, failure.attempts) == (2, 0)
    assert failure.error == "Its worker died 2 times."
    assert (command, statuses_of(Charge)) == (Charge(), [Status.FAILED])


def test_the_failure_of_a_command_as_large_as_may_be_is_told(
    workflows: ModuleType, settings: Any
) -> None:
    """H52: the notice holds the command, and may be larger than any message of a user's."""
    settings.DJANGO_WORKFLOWS = {"MAX_BODY_BYTES": 1_000}
    told = charges(text='"' * 400)  # each is two characters in JSON, and four in JSON in JSON
    handles(Charge, name="charge", attempts=1)(_fails)

    publish(Opened())
    workflows.run_until_idle()

    assert statuses_of(Charge) == [Status.FAILED]
    assert [command.text for command, _failure in told] == ['"' * 400]


def test_the_failure_and_the_notice_commit_together(
    workflows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B9 for the engine's own message: what cannot be told is not recorded either."""
    charges()
    handles(Charge, name="charge", attempts=1)(_fails)

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("INSERT") and "CommandFailed" in str(rest[0]):
            raise RuntimeError("the connection broke")
        return execute(sql, *rest)

    publish(Opened())
    take_and_deliver_one()
    with connection.execute_wrapper(refuse):
        take_and_deliver_one()
    between = statuses_of(Charge)

    assert between == [Status.RUNNING]  # the lease runs out, and the relay has it
    assert statuses_of(CommandFailed) == []


@pytest.mark.parametrize("how", ["raises", "kills"])
def test_an_undo_command_of_a_workflow_that_is_gone_fails_all_the_same(
    settings: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """H52 and H55: else its failure could not be recorded, and the relay would stop at it."""
    settings.DJANGO_WORKFLOWS = {"LOSSES": 1, "LEASE": MINUTE}
    handles(Charge, name="charge", attempts=1)(_fails)
    handles(Ship, name="ship")(lambda message, context: None)
    send(Charge(), Ship())
    undo = delivery_of(Charge)
    Delivery.objects.filter(pk=undo.pk).update(
        undoes=True, sender="gone.Workflow", sender_instance_id=undo.pk
    )

    if how == "kills":
        assert claim(undo.pk) is not None
    move_clock_on(monkeypatch, timedelta(hours=1))
    deliver_due()

    assert statuses_of(Charge) == [Status.FAILED]
    assert statuses_of(Ship) == [Status.HANDLED]


def take_and_deliver_one() -> None:
    oldest = Delivery.objects.filter(status=Status.PENDING).order_by("due_at", "pk")[0]
    deliver(oldest.pk)


def _fails(message: Any, context: HandlerContext) -> None:
    Note.objects.create(text="never there")
    raise ValueError("no")


def _sends_both(message: Counted, state: TallyState, context: Any) -> None:
    context.send(Charge(), Ship())
