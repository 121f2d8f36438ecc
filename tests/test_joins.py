"""`@when_all`: a step that runs once, when all of several messages have arrived."""

from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from types import ModuleType
from typing import Any

import pytest
from django.db import connection

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Workflow,
    define_workflow,
    handles,
    publish,
    started_by,
    when,
    when_all,
)
from django_workflows.dispatch import deliver
from django_workflows.models import Delivery, Status
from django_workflows.notices import JoinComplete
from tests.concurrency import at_once
from tests.delivering import delivery_of, statuses_of
from tests.models import ParcelState, TallyState
from tests.racing import deliver_at_once, work_on_all

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("isolated_registry"),
]


class Opened(Event):
    key: str = "k"
    total: int = 0


class Resized(Event):
    key: str = "k"
    total: int


class Answered(Event):
    key: str = "k"
    number: int


class Packed(Event):
    key: str = "k"


class Paid(Event):
    key: str = "k"


class Stamped(Event):
    key: str = "k"


class Ask(Command):
    number: int


def tallies(
    *messages: type[Event],
    on_complete: Callable[[Any], None] = lambda workflow: None,
    **options: Any,
) -> list[list[Any]]:
    """Declares a workflow that joins these messages; what its step was called with."""
    ran: list[list[Any]] = []

    class Tallies(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def open(self, message: Opened) -> None:
            self.state.total = message.total

        @when(Resized, lookup="key")
        def resize(self, message: Resized) -> None:
            self.state.total = message.total

        @when_all(*messages, lookup="key", **options)
        def all_there(self, arrived: list[Any]) -> None:
            ran.append(arrived)
            self.state.seen.append(len(arrived))
            on_complete(self)

    return ran


def answers(*numbers: int, key: str = "k") -> list[Answered]:
    return [Answered(key=key, number=number) for number in numbers]


# One of each


@pytest.mark.parametrize("order", list(permutations((Packed, Paid, Stamped))))
def test_messages_of_several_kinds_may_arrive_in_any_order(
    workflows: ModuleType, order: tuple[type[Event], ...]
) -> None:
    """F46."""
    ran = tallies(Packed, Paid, Stamped)
    publish(Opened())
    workflows.run_until_idle()

    lengths = []
    for message in order:
        publish(message())
        workflows.run_until_idle()
        lengths.append(len(ran))

    assert lengths == [0, 0, 1]
    assert ran == [[message() for message in order]]


def test_two_of_a_kind_do_not_stand_for_one_that_is_missing(workflows: ModuleType) -> None:
    """F46, with one missing."""
    ran = tallies(Packed, Paid, Stamped)

    publish(Opened(), Packed(), Paid(), Packed(), Paid())
    workflows.run_until_idle()
    before = list(ran)
    publish(Stamped())
    workflows.run_until_idle()

    assert before == []
    assert ran == [[Packed(), Paid(), Stamped()]]


# So many in all


def test_a_join_may_count_to_a_number(workflows: ModuleType) -> None:
    """F46: the step has the messages at hand, oldest first."""
    ran = tallies(Answered, count=3)

    publish(Opened(), *answers(1, 2))
    workflows.run_until_idle()
    before = list(ran)
    publish(*answers(3))
    workflows.run_until_idle()

    assert (before, ran) == ([], [answers(1, 2, 3)])
    assert TallyState.objects.get().seen == [3]


def test_a_join_may_count_to_a_field_of_the_state(workflows: ModuleType) -> None:
    ran = tallies(Answered, count="total")

    publish(Opened(key="two", total=2), Opened(key="three", total=3))
    workflows.run_until_idle()
    publish(*answers(1, 2, key="two"), *answers(1, 2, key="three"))
    workflows.run_until_idle()

    assert ran == [answers(1, 2, key="two")]


def test_a_join_may_count_to_a_function_of_the_state(workflows: ModuleType) -> None:
    ran = tallies(Answered, count=lambda state: state.total * 2)

    publish(Opened(total=2))
    workflows.run_until_idle()
    publish(*answers(1, 2, 3))
    workflows.run_until_idle()
    before = list(ran)
    publish(*answers(4))
    workflows.run_until_idle()

    assert (before, ran) == ([], [answers(1, 2, 3, 4)])


def test_a_join_may_count_messages_of_several_kinds_together(workflows: ModuleType) -> None:
    ran = tallies(Answered, Packed, count=3)

    publish(Opened())
    workflows.run_until_idle()
    publish(*answers(1), Packed(), *answers(2))
    workflows.run_until_idle()

    assert sorted(map(repr, ran[0])) == sorted(map(repr, [*answers(1), Packed(), *answers(2)]))


@pytest.mark.parametrize("count", [0, "total", lambda state: state.total])
def test_a_join_of_nothing_is_complete_at_the_start(workflows: ModuleType, count: Any) -> None:
    ran = tallies(Answered, count=count)

    publish(Opened(total=0))
    workflows.run_until_idle()

    assert ran == [[]]


def test_a_count_that_a_later_step_sets_to_zero_completes_the_join(workflows: ModuleType) -> None:
    ran = tallies(Answered, count="total")
    publish(Opened(total=2))
    workflows.run_until_idle()

    publish(Resized(total=0))
    workflows.run_until_idle()

    assert ran == [[]]


@pytest.mark.parametrize("count", ["total", lambda state: state.total])
def test_a_count_that_a_later_step_lowers_completes_the_join(
    workflows: ModuleType, count: Any
) -> None:
    ran = tallies(Answered, count=count)
    publish(Opened(total=5), *answers(1, 2))
    workflows.run_until_idle()

    publish(Resized(total=3))
    workflows.run_until_idle()
    before = list(ran)
    publish(Resized(total=2))
    workflows.run_until_idle()

    assert (before, ran) == ([], [answers(1, 2)])


def test_a_count_that_a_later_step_raises_is_waited_for(workflows: ModuleType) -> None:
    ran = tallies(Answered, count="total")
    publish(Opened(total=2), *answers(1))
    workflows.run_until_idle()

    publish(Resized(total=3), *answers(2))
    workflows.run_until_idle()
    before = list(ran)
    publish(*answers(3))
    workflows.run_until_idle()

    assert (before, ran) == ([], [answers(1, 2, 3)])


def test_a_count_that_is_not_known_yet_is_not_reached(workflows: ModuleType) -> None:
    """A field that is still None: the step that sets it completes the join."""
    ran = []

    class Parcels(Workflow[ParcelState]):
        @started_by(Opened)
        def open(self, message: Opened) -> None: ...

        @when(Resized, lookup="key", maps_to="customer")
        def resize(self, message: Resized) -> None:
            self.state.number = message.total

        @when_all(Answered, count="number", lookup="key", maps_to="customer")
        def all_there(self, arrived: list[Answered]) -> None:
            ran.append(arrived)

    ParcelState.objects.create(customer="k")
    publish(Opened(), *answers(1, 2))
    workflows.run_until_idle()
    before = workflows.failed(), list(ran)
    publish(Resized(total=2))
    workflows.run_until_idle()

    assert before == ([], [])
    assert ran == [answers(1, 2)]


# Duplicates, and what comes late


def test_a_delivery_that_the_broker_delivers_twice_arrives_once(workflows: ModuleType) -> None:
    """F46 and B13 together."""
    ran = tallies(Answered, count=2)
    publish(Opened())
    workflows.run_until_idle()
    publish(*answers(1))
    arrival = delivery_of(Answered).pk

    deliver_at_once(arrival, arrival, arrival)
    workflows.run_until_idle()

    assert ran == []
    assert statuses_of(Answered) == [Status.HANDLED]


def test_messages_that_are_distinct_by_a_field_count_once_each(workflows: ModuleType) -> None:
    """F46, with duplicates: the first of each counts."""
    ran = tallies(Answered, count=3, distinct="number")

    publish(Opened(), *answers(1, 1, 2, 2, 1))
    workflows.run_until_idle()
    before = list(ran)
    publish(*answers(3))
    workflows.run_until_idle()

    assert (before, ran) == ([], [answers(1, 2, 3)])


def test_what_arrives_after_completion_is_ignored(workflows: ModuleType) -> None:
    """F46: and the step does not run again, whatever the count becomes."""
    ran = tallies(Answered, count="total")
    publish(Opened(total=2), *answers(1, 2))
    workflows.run_until_idle()

    publish(*answers(3), Resized(total=3), *answers(4))
    workflows.run_until_idle()

    assert len(ran) == 1
    assert statuses_of(Answered) == [Status.HANDLED] * 2 + [Status.IGNORED] * 2
    late = Delivery.objects.filter(status=Status.IGNORED)[0]
    assert late.reason.startswith("The join all_there of tests.TallyState ")


def test_what_arrives_after_the_join_has_ended_the_instance_is_ignored(
    workflows: ModuleType,
) -> None:
    """D32."""
    ran = tallies(Answered, count=2, on_complete=lambda workflow: workflow.complete())
    publish(Opened(), *answers(1, 2))
    workflows.run_until_idle()

    publish(*answers(3))
    workflows.run_until_idle()

    assert len(ran) == 1
    assert TallyState.objects.get().lifecycle == "completed"
    assert statuses_of(Answered) == [Status.HANDLED] * 2 + [Status.IGNORED]


# The instance


def test_an_arrival_does_not_touch_the_instance(workflows: ModuleType) -> None:
    ran = tallies(Answered, count=3)
    publish(Opened())
    workflows.run_until_idle()
    before = TallyState.objects.values().get()

    publish(*answers(1, 2))
    workflows.run_until_idle()

    assert TallyState.objects.values().get() == before
    arrived = Delivery.objects.filter(message_name="tests.Answered")
    assert set(arrived.values_list("instance_id", "step")) == {(before["id"], "all_there")}
    assert ran == []


def test_the_instances_of_a_workflow_do_not_share_their_arrivals(workflows: ModuleType) -> None:
    ran = tallies(Answered, count=2)

    publish(Opened(key="a"), Opened(key="b"))
    workflows.run_until_idle()
    publish(*answers(1, key="a"), *answers(2, key="b"), *answers(3, key="a"))
    workflows.run_until_idle()

    assert ran == [answers(1, 3, key="a")]


def test_answers_to_commands_are_joined_by_the_reply(workflows: ModuleType) -> None:
    """F46 and F43: n answers to n commands, without a lookup."""
    ran = []
    workflow = define_workflow(TallyState)

    @workflow.started_by(Opened, once_per="key")
    def open_(message: Opened, state: TallyState, context: Any) -> None:
        state.total = message.total
        context.send(*(Ask(number=number) for number in range(message.total)))

    @workflow.when_all(Answered, count="total")
    def all_there(arrived: list[Answered], state: TallyState, context: Any) -> None:
        ran.append((state.key, sorted(message.number for message in arrived)))
        context.complete()

    @handles(Ask, name="ask")
    def answer(message: Ask, context: HandlerContext) -> None:
        context.reply(Answered(number=message.number))

    publish(Opened(key="a", total=3), Opened(key="b", total=5))
    workflows.run_until_idle()

    assert sorted(ran) == [("a", [0, 1, 2]), ("b", [0, 1, 2, 3, 4])]


def test_a_workflow_may_have_several_joins(workflows: ModuleType) -> None:
    ran: list[str] = []

    class Tallies(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def open(self, message: Opened) -> None: ...

        @when_all(Answered, count=2, lookup="key")
        def answered(self, messages: list[Answered]) -> None:
            ran.append("answered")

        @when_all(Packed, Paid, lookup="key")
        def ready(self, messages: list[Any]) -> None:
            ran.append("ready")

    publish(Opened(), Packed(), *answers(1))
    workflows.run_until_idle()
    publish(Paid())
    workflows.run_until_idle()
    publish(*answers(2))
    workflows.run_until_idle()

    assert ran == ["ready", "answered"]


def test_arrivals_may_come_before_the_instance(workflows: ModuleType) -> None:
    """F46 and D31 together."""
    ran = tallies(Answered, count=2, if_missing="wait")

    publish(*answers(1, 2))
    workflows.run_until_idle()
    publish(Opened())
    workflows.run_until_idle()

    assert ran == [answers(1, 2)]


def test_the_step_of_a_join_that_fails_is_retried_and_its_arrivals_are_kept(
    workflows: ModuleType,
) -> None:
    """F46 and H51 together."""
    attempts = []

    def fail_twice(workflow: Any) -> None:
        attempts.append(workflow.attempt)
        if len(attempts) < 3:
            raise ValueError("not yet")

    ran = tallies(
        Answered, count=2, on_complete=fail_twice, attempts=5, backoff=timedelta(minutes=1)
    )
    publish(Opened(), *answers(1, 2))
    workflows.advance(timedelta(hours=1))

    assert attempts == [1, 2, 3]
    assert ran[-1] == answers(1, 2)
    assert TallyState.objects.get().seen == [2]
    assert statuses_of(JoinComplete) == [Status.HANDLED]


def test_the_step_of_a_join_may_cancel_a_timeout(workflows: ModuleType) -> None:
    """F46 and E39: the usual end of waiting for answers."""

    class TooLate(Command):
        pass

    seen = []

    class Tallies(Workflow[TallyState]):
        @started_by(Opened, once_per="key")
        def open(self, message: Opened) -> None:
            self.send(TooLate(), delay=timedelta(hours=1))

        @when_all(Answered, count=2, lookup="key")
        def all_there(self, arrived: list[Answered]) -> None:
            self.cancel(TooLate)

        @when(TooLate)
        def give_up(self, message: TooLate) -> None:
            seen.append(self.state.key)
            self.complete()

    publish(Opened(key="a"), Opened(key="b"), *answers(1, 2, key="a"), *answers(1, key="b"))
    workflows.advance(timedelta(hours=2))

    assert seen == ["b"]


# Many at once


def test_the_last_two_at_the_same_moment_complete_the_join_once(workflows: ModuleType) -> None:
    """F46: each of the two could take the other for missing."""
    ran = tallies(Answered, count=2)
    rounds = 40 if connection.vendor == "postgresql" else 10
    publish(*(Opened(key=str(number)) for number in range(rounds)))
    workflows.run_until_idle()

    for number in range(rounds):
        publish(*answers(1, 2, key=str(number)))
        pending = Delivery.objects.filter(status=Status.PENDING, message_name="tests.Answered")
        deliver_at_once(*pending.values_list("pk", flat=True))
    workflows.run_until_idle()

    assert sorted(messages[0].key for messages in ran) == sorted(map(str, range(rounds)))
    assert all(len(messages) == 2 for messages in ran)


def test_an_arrival_raced_with_a_lowered_count_completes_the_join_once(
    workflows: ModuleType,
) -> None:
    ran = tallies(Answered, count="total")
    rounds = 30 if connection.vendor == "postgresql" else 8
    publish(*(Opened(key=str(number), total=3) for number in range(rounds)))
    workflows.run_until_idle()

    for number in range(rounds):
        publish(*answers(1, key=str(number)))
        workflows.run_until_idle()
        publish(*answers(2, key=str(number)), Resized(key=str(number), total=2))
        pending = Delivery.objects.filter(status=Status.PENDING)
        deliver_at_once(*pending.values_list("pk", flat=True))
    workflows.run_until_idle()

    assert sorted(messages[0].key for messages in ran) == sorted(map(str, range(rounds)))


@pytest.mark.timeout(200)
def test_many_reporters_on_eight_threads_run_the_step_once_without_a_conflict() -> None:
    """F46: for three instances, whose answers come in mixed order."""
    answers_each = 50 if connection.vendor == "postgresql" else 12
    ran = tallies(Answered, count="total", on_complete=lambda workflow: workflow.complete())
    keys = ["a", "b", "c"]
    publish(*(Opened(key=key, total=answers_each) for key in keys))
    work_on_all(threads=1)

    publish(*(Answered(key=key, number=n) for n in range(answers_each) for key in keys))
    work_on_all(threads=8)

    assert sorted(messages[0].key for messages in ran) == keys
    assert all(
        sorted(message.number for message in messages) == list(range(answers_each))
        for messages in ran
    )
    assert set(Delivery.objects.values_list("status", flat=True)) == {Status.HANDLED}
    if connection.vendor == "postgresql":
        arrivals = Delivery.objects.filter(message_name="tests.Answered")
        assert sum(arrivals.values_list("conflicts", flat=True)) == 0


def test_a_message_that_starts_raced_with_all_arrivals_runs_the_step_once() -> None:
    """F46 and D31: whoever comes first."""
    ran = tallies(Answered, count=3, if_missing="wait")
    publish(Opened(), *answers(1, 2, 3))

    at_once(*[lambda pk=pk: deliver(pk) for pk in Delivery.objects.values_list("pk", flat=True)])
    work_on_all(threads=2)

    assert [sorted(message.number for message in messages) for messages in ran] == [[1, 2, 3]]
