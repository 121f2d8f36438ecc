"""What becomes of a failure: declared for a step, a handler, a workflow, or the project."""

from datetime import timedelta
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from django_workflows import (
    Command,
    CommandFailed,
    Event,
    HandlerContext,
    RetryLater,
    Unrecoverable,
    Workflow,
    define_workflow,
    handles,
    on_failure,
    publish,
    send,
    started_by,
    when,
)
from django_workflows.models import Delivery, Status
from django_workflows.recovery import FailureFacts, GiveUp, RetryAfter
from tests.delivering import delivery_of, statuses_of
from tests.models import Note, TallyState

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("isolated_registry")]

MINUTE = timedelta(minutes=1)


class Opened(Event):
    key: str = "k"


class Counted(Event):
    key: str = "k"


class Charge(Command):
    pass


class Ship(Command):
    pass


class RateLimited(Exception):
    pass


class Declined(Exception):
    pass


class CardExpired(Declined):
    pass


class Failing:
    """Raises what it is given, as often as it is called, and counts."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or ValueError("no")
        self.runs = 0

    def __call__(self, *_arguments: Any) -> None:
        self.runs += 1
        raise self.error


def test_a_handler_has_its_own_attempts_and_backoff(workflows: ModuleType) -> None:
    fails = Failing()
    handles(Charge, name="charge", attempts=2, backoff=5 * MINUTE)(fails)

    send(Charge())
    workflows.run_until_idle()
    workflows.advance(4 * MINUTE)
    early = fails.runs
    workflows.advance(2 * MINUTE)
    workflows.advance(timedelta(days=1))

    assert (early, fails.runs) == (1, 2)
    assert statuses_of(Charge) == [Status.FAILED]


def test_a_backoff_may_be_a_function_of_the_failures(workflows: ModuleType) -> None:
    """H51 with waits of one's own: 10, 20, 30 minutes."""
    fails = Failing()
    handles(Charge, name="charge", attempts=4, backoff=lambda n: n * 10 * MINUTE)(fails)

    send(Charge())
    workflows.run_until_idle()
    runs = []
    for _ in range(7):
        workflows.advance(10 * MINUTE)
        runs.append(fails.runs)

    assert runs == [2, 2, 3, 3, 3, 4, 4]


def test_an_error_that_is_declared_unrecoverable_is_not_retried(workflows: ModuleType) -> None:
    """H53: nor is a subclass of it; any other error is."""
    fails = Failing(CardExpired("03/19"))
    handles(Charge, name="charge", unrecoverable=[Declined])(fails)
    handles(Ship, name="ship", unrecoverable=[Declined])(Failing(KeyError("x")))

    send(Charge(), Ship())
    workflows.run_until_idle()

    assert fails.runs == 1
    assert statuses_of(Charge) == [Status.FAILED]
    assert statuses_of(Ship) == [Status.PENDING]


def test_a_step_has_its_own_policy_and_the_workflow_completes_it(workflows: ModuleType) -> None:
    runs = {"opened": Failing(), "counted": Failing(Declined("no"))}

    class Tallies(Workflow[TallyState], attempts=3, backoff=MINUTE, unrecoverable=[Declined]):
        @started_by(Opened, attempts=2)
        def open(self, message: Opened) -> None:
            runs["opened"]()

        @when(Counted, lookup="key")
        def count(self, message: Counted) -> None:
            runs["counted"]()

    TallyState.objects.create(key="k")
    publish(Opened(), Counted())
    workflows.advance(timedelta(hours=1))

    assert {name: one.runs for name, one in runs.items()} == {"opened": 2, "counted": 1}
    assert (statuses_of(Opened), statuses_of(Counted)) == ([Status.FAILED], [Status.FAILED])


def test_a_workflow_of_functions_has_a_policy_too(workflows: ModuleType) -> None:
    fails = Failing()
    workflow = define_workflow(TallyState, attempts=1)
    workflow.started_by(Opened)(_named("open", fails))

    publish(Opened())
    workflows.advance(timedelta(hours=1))

    assert fails.runs == 1
    assert statuses_of(Opened) == [Status.FAILED]


def test_the_step_that_starts_and_the_one_that_continues_have_each_their_own(
    workflows: ModuleType,
) -> None:
    """Also when both are for one message."""
    starting, continuing = Failing(), Failing()

    class Tallies(Workflow[TallyState], backoff=MINUTE):
        @started_by(Opened, once_per="key", attempts=1)
        def open(self, message: Opened) -> None:
            starting()

        @when(Opened, lookup="key", attempts=3)
        def open_again(self, message: Opened) -> None:
            continuing()

    TallyState.objects.create(key="there")
    publish(Opened(key="new"), Opened(key="there"))
    workflows.advance(timedelta(hours=1))

    assert (starting.runs, continuing.runs) == (1, 3)


def test_steps_for_the_failure_of_two_commands_have_each_their_own(workflows: ModuleType) -> None:
    handles(Charge, name="charge", attempts=1)(Failing())
    handles(Ship, name="ship", attempts=1)(Failing())
    runs = {"charge": Failing(), "ship": Failing()}

    class Tallies(Workflow[TallyState], backoff=MINUTE):
        @started_by(Opened)
        def open(self, message: Opened) -> None:
            self.send(Charge(), Ship())

        @on_failure(Charge, attempts=1)
        def not_charged(self, command: Charge, failure: CommandFailed) -> None:
            runs["charge"]()

        @on_failure(Ship, attempts=3)
        def not_shipped(self, command: Ship, failure: CommandFailed) -> None:
            runs["ship"]()

    publish(Opened())
    workflows.advance(timedelta(hours=1))

    assert {name: one.runs for name, one in runs.items()} == {"charge": 1, "ship": 3}


def test_retry_later_waits_as_long_as_it_says_and_uses_up_no_attempt(
    workflows: ModuleType,
) -> None:
    attempts = []

    @handles(Charge, name="charge", attempts=1)
    def charge(message: Charge, context: HandlerContext) -> None:
        attempts.append(context.attempt)
        Note.objects.create(text="charged")
        if len(attempts) < 4:
            raise RetryLater(3 * MINUTE, "429: too many requests")

    send(Charge())
    workflows.run_until_idle()
    waiting = delivery_of(Charge)
    workflows.advance(2 * MINUTE)
    early = list(attempts)
    workflows.advance(8 * MINUTE)

    assert (waiting.status, waiting.attempts) == (Status.PENDING, 0)
    assert waiting.reason == "django_workflows.errors.RetryLater: 429: too many requests"
    assert (early, attempts) == ([1], [1, 1, 1, 1])
    assert statuses_of(Charge) == [Status.HANDLED]
    assert Note.objects.count() == 1


def test_time_spent_on_retry_later_does_not_count_as_held_up(workflows: ModuleType) -> None:
    """H54: else the first worker that is too old for the message would fail it for good."""
    asked: list[int] = []

    def charge(message: Charge, context: HandlerContext) -> None:
        asked.append(context.attempt)
        raise RetryLater(timedelta(hours=1))

    handles(Charge, name="charge")(charge)
    send(Charge())
    workflows.run_until_idle()

    with workflows.isolated_registry():
        workflows.advance(timedelta(hours=1, minutes=1))

    assert asked == [1]
    assert statuses_of(Charge) == [Status.PENDING]


def test_fail_ends_a_handler_for_good_with_its_reason(workflows: ModuleType) -> None:
    @handles(Charge, name="charge")
    def charge(message: Charge, context: HandlerContext) -> None:
        Note.objects.create(text="charged")
        context.fail("The card was stolen.")

    send(Charge())
    workflows.run_until_idle()

    failed = delivery_of(Charge)
    assert (failed.status, failed.attempts) == (Status.FAILED, 1)
    assert failed.error == "django_workflows.errors.Unrecoverable: The card was stolen."
    assert not Note.objects.exists()


def test_fail_ends_a_step_for_good_and_nothing_of_it_is_there(workflows: ModuleType) -> None:
    handles(Charge, name="charge")(Failing())

    class Tallies(Workflow[TallyState]):
        @started_by(Opened)
        def open(self, message: Opened) -> None:
            self.send(Charge())
            self.fail("Not today.")

    publish(Opened())
    workflows.run_until_idle()

    assert delivery_of(Opened).error.endswith("Unrecoverable: Not today.")
    assert (TallyState.objects.count(), statuses_of(Charge)) == (0, [])


def test_an_error_that_extends_unrecoverable_is_not_retried(workflows: ModuleType) -> None:
    class Hopeless(Unrecoverable):
        pass

    fails = Failing(Hopeless("so it is"))
    handles(Charge, name="charge")(fails)

    send(Charge())
    workflows.advance(timedelta(days=1))

    assert (fails.runs, statuses_of(Charge)) == (1, [Status.FAILED])


# A policy of the project


def our_policy(error: BaseException, facts: FailureFacts) -> RetryAfter | GiveUp | None:
    """What a project may write."""
    if isinstance(error, RateLimited):
        return RetryAfter(7 * MINUTE * facts.attempts)
    if isinstance(error, Declined):
        return GiveUp()
    return None


def test_a_policy_is_tested_by_calling_it() -> None:
    facts = FailureFacts("tests.Charge", "charge", uuid4(), attempts=2)

    answers = [our_policy(error, facts) for error in (RateLimited(), Declined(), KeyError())]

    assert answers == [RetryAfter(14 * MINUTE), GiveUp(), None]


@pytest.mark.parametrize("named", [our_policy, "tests.test_recovery_policy.our_policy"])
def test_the_policy_of_the_project_decides_what_nothing_nearer_does(
    workflows: ModuleType, settings: Any, named: Any
) -> None:
    settings.DJANGO_WORKFLOWS = {"RECOVERY": named}
    limited, declined = Failing(_this_modules("RateLimited")), Failing(_this_modules("Declined"))
    handles(Charge, name="charge")(limited)
    handles(Ship, name="ship")(declined)

    send(Charge(), Ship())
    runs = []
    for minutes in (6, 2, 12, 2):
        workflows.advance(minutes * MINUTE)
        runs.append(limited.runs)

    assert runs == [1, 2, 2, 3]
    assert (declined.runs, statuses_of(Ship)) == (1, [Status.FAILED])


def test_where_the_policy_says_nothing_the_settings_decide(
    workflows: ModuleType, settings: Any
) -> None:
    settings.DJANGO_WORKFLOWS = {"RECOVERY": our_policy, "ATTEMPTS": 2, "BACKOFF": MINUTE}
    fails = Failing(KeyError("x"))
    handles(Charge, name="charge")(fails)

    send(Charge())
    workflows.advance(timedelta(hours=1))

    assert (fails.runs, statuses_of(Charge)) == (2, [Status.FAILED])


def test_what_is_declared_nearer_wins_over_the_policy(workflows: ModuleType, settings: Any) -> None:
    settings.DJANGO_WORKFLOWS = {"RECOVERY": our_policy}
    fails = Failing(Declined("no"))
    handles(Charge, name="charge", attempts=3, backoff=MINUTE)(fails)

    send(Charge())
    workflows.advance(timedelta(hours=1))

    assert fails.runs == 3


def test_a_policy_that_raises_leaves_it_to_the_settings(
    workflows: ModuleType, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """H52: the failure is recorded whatever the policy does."""
    settings.DJANGO_WORKFLOWS = {"RECOVERY": Failing(TypeError("oh")), "ATTEMPTS": 2}
    fails = Failing(KeyError("x"))
    handles(Charge, name="charge")(fails)

    send(Charge())
    workflows.advance(timedelta(hours=1))

    failed = delivery_of(Charge)
    assert (failed.status, failed.attempts, fails.runs) == (Status.FAILED, 2, 2)
    assert failed.error == "KeyError: 'x'"
    assert "TypeError: oh" in caplog.text


def test_a_backoff_that_raises_leaves_it_to_the_settings(workflows: ModuleType) -> None:
    """H52."""
    fails = Failing(KeyError("x"))
    handles(Charge, name="charge", attempts=3, backoff=Failing(TypeError("oh")))(fails)

    send(Charge())
    workflows.advance(timedelta(hours=1))

    assert (fails.runs, Delivery.objects.get().status) == (3, Status.FAILED)


@pytest.mark.parametrize("wait", [3, None, -MINUTE])
def test_a_backoff_that_gives_no_wait_leaves_it_to_the_settings(
    workflows: ModuleType, wait: Any
) -> None:
    fails = Failing(KeyError("x"))
    handles(Charge, name="charge", attempts=3, backoff=lambda _failures: wait)(fails)

    send(Charge())
    workflows.advance(timedelta(hours=1))

    assert (fails.runs, Delivery.objects.get().status) == (3, Status.FAILED)


def test_what_cannot_be_followed_leaves_it_to_the_settings(
    workflows: ModuleType, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_WORKFLOWS = {"ATTEMPTS": 2}
    fails = Failing(KeyError("x"))
    handles(Charge, name="charge", unrecoverable=["KeyError"])(fails)  # type: ignore[list-item]

    send(Charge())
    workflows.advance(timedelta(hours=1))

    failed = delivery_of(Charge)
    assert (failed.status, failed.error, fails.runs) == (Status.FAILED, "KeyError: 'x'", 2)
    assert "cannot be followed" in caplog.text


def _named(name: str, function: Any) -> Any:
    """The callable as a function of this name, which a step must have."""

    def step(*arguments: Any) -> None:
        function(*arguments)

    step.__name__ = name
    return step


def _this_modules(name: str) -> BaseException:
    """An error of the class that the dotted path will find: pytest may have imported us twice."""
    from tests import test_recovery_policy

    error: BaseException = getattr(test_recovery_policy, name)()
    return error
