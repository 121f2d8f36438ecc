"""What a person does to deliveries: skip, cancel, make due, replay with another body, undo on.

Replays as they are: `test_replaying.py`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Unrecoverable,
    WorkflowContext,
    batching,
    define_workflow,
    dispatch,
    handles,
    publish,
    send,
    wait,
)
from django_workflows.cancelling import cancel_deliveries
from django_workflows.errors import (
    NotSerialisable,
    ReasonMissing,
    TooLarge,
    UnknownName,
    UnreadableBody,
)
from django_workflows.models import REPLAYABLE, Delivery, Lifecycle, Status
from django_workflows.replaying import continue_compensation, edited, replay, replay_edited
from django_workflows.rescheduling import make_due
from django_workflows.skipping import skip
from tests.concurrency import at_once
from tests.delivering import deliver_due, delivery_of, statuses_of
from tests.models import Note, ParcelState, TallyState
from tests.stored import stored

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

Context = WorkflowContext[TallyState]


class Begun(Event):
    key: str = "k"


class Undo(Command):
    number: int


class CalledOff(Event):
    key: str = "k"


class Pay(Command):
    amount: int
    note: str = ""


def everything() -> Any:
    return Delivery.objects.all()


def skip_all() -> int:
    return skip(everything(), reason="Ada did it.")


def cancel_all() -> int:
    return cancel_deliveries(everything(), reason="Not wanted.")


def a_process_to_undo(steps: int = 3, *, fails_at: int = 0) -> None:
    """Notes `steps` undo commands at its start; CalledOff has them sent, the newest first."""
    workflow = define_workflow(TallyState)

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        for number in range(1, steps + 1):
            context.compensate_with(Undo(number=number))

    @workflow.when(CalledOff, lookup="key")
    def call_off(message: CalledOff, state: TallyState, context: Context) -> None:
        context.compensate()

    @handles(Undo)
    def undo(message: Undo, context: HandlerContext) -> None:
        if message.number == fails_at:
            raise Unrecoverable("it cannot be undone")
        Note.objects.create(text=f"undone {message.number}")


def begun_and_called_off() -> TallyState:
    publish(Begun())
    deliver_due()
    publish(CalledOff())
    deliver_due()
    return TallyState.objects.get()


def undone() -> list[int]:
    return [int(note.text.removeprefix("undone ")) for note in Note.objects.order_by("pk")]


def payments() -> None:
    @handles(Pay, name="tests.pay")
    def pay(message: Pay, context: HandlerContext) -> None:
        if message.amount < 0:
            raise Unrecoverable("a negative amount")
        Note.objects.create(text=str(message.amount))


def a_failed_payment() -> Delivery:
    payments()
    send(Pay(amount=-1))
    deliver_due()
    return delivery_of(Pay)


# What each leaves alone


@pytest.mark.parametrize(
    ("act", "changed"),
    [
        (skip_all, {Status.PENDING, Status.FAILED}),
        (cancel_all, {Status.PENDING, Status.NOTED}),
        (lambda: make_due(everything()), {Status.PENDING}),
        (lambda: replay(everything()), set(REPLAYABLE)),
    ],
    ids=["skip", "cancel", "make due", "replay"],
)
def test_only_what_fits_is_changed_and_what_is_running_never(
    act: Callable[[], int], changed: set[Status]
) -> None:
    later = timezone.now() + timedelta(hours=1)
    rows = {status: stored(status=status, due_at=later) for status in Status}
    before = {status: fields_of(row) for status, row in rows.items()}

    count = act()

    after = {status: fields_of(row) for status, row in rows.items()}
    assert {status for status in Status if before[status] != after[status]} == changed
    assert count == len(changed)


def fields_of(delivery: Delivery) -> dict[str, Any]:
    return Delivery.objects.filter(pk=delivery.pk).values().get()


# Skipping


def test_what_is_skipped_is_handled_with_its_reason_and_does_not_run() -> None:
    failed = a_failed_payment()

    skip(everything(), reason="Ada paid at the counter.")
    deliver_due()

    failed.refresh_from_db()
    assert (failed.status, failed.reason) == (Status.HANDLED, "Ada paid at the counter.")
    assert failed.ended_at is not None
    assert "a negative amount" in failed.error, "what had happened is still seen"
    assert not Note.objects.exists()


@pytest.mark.parametrize("reason", ["", " \n"])
def test_nothing_is_skipped_without_a_reason(reason: str) -> None:
    stored()

    with pytest.raises(ReasonMissing, match="needs a reason"):
        skip(everything(), reason=reason)

    assert Delivery.objects.get().status == Status.FAILED


def test_a_skipped_undo_command_lets_the_undoing_go_on() -> None:
    a_process_to_undo(fails_at=2)
    instance = begun_and_called_off()
    before = instance.lifecycle

    skip(Delivery.objects.filter(undoes=True), reason="Ada undid it.")
    between = TallyState.objects.get().lifecycle
    deliver_due()

    assert before == Lifecycle.FAILED
    assert between == Lifecycle.COMPENSATING
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED
    assert undone() == [3, 1]


def test_skipping_the_last_undo_command_ends_the_instance() -> None:
    a_process_to_undo(fails_at=1)
    begun_and_called_off()

    skip(Delivery.objects.filter(undoes=True), reason="Ada undid it.")

    instance = TallyState.objects.get()
    assert instance.lifecycle == Lifecycle.COMPENSATED
    assert instance.ended_at is not None


def test_an_undo_command_that_two_skip_at_once_is_skipped_once() -> None:
    a_process_to_undo(fails_at=3)
    begun_and_called_off()
    # By its id: the next one, which then leaves, could be skipped as well.
    failed = Delivery.objects.filter(pk=Delivery.objects.get(status=Status.FAILED).pk)

    def skip_it() -> int:
        return skip(failed.all(), reason="Done by hand.")

    counts = at_once(skip_it, skip_it)

    assert sorted(counts) == [0, 1]
    assert statuses_of(Undo) == [Status.NOTED, Status.PENDING, Status.HANDLED]


def test_a_worker_that_lost_what_is_then_skipped_does_not_think_it_has_handled_it() -> None:
    ended: list[Any] = []
    payments()

    @handles(Begun, name="tests.slow", atomic=False)
    def slow(message: Begun, context: HandlerContext) -> None:
        Delivery.objects.filter(pk=context.delivery_id).update(status=Status.PENDING)
        skip_all()

    publish(Begun())
    ended.append(dispatch.deliver(delivery_of(Begun).pk))

    assert "Lost" in repr(ended[0])


# Cancelling


def test_what_is_cancelled_does_not_run_and_can_be_replayed() -> None:
    payments()
    send(Pay(amount=3))

    cancel_all()
    deliver_due()
    cancelled = delivery_of(Pay)
    replay(everything())
    deliver_due()

    assert (cancelled.status, cancelled.reason) == (Status.CANCELLED, "Not wanted.")
    assert Note.objects.get().text == "3"


def test_a_cancelled_note_is_not_undone() -> None:
    a_process_to_undo()
    publish(Begun())
    deliver_due()

    cancel_deliveries(Delivery.objects.filter(body__contains="2"), reason="It must not be undone.")
    publish(CalledOff())
    deliver_due()

    assert undone() == [3, 1]
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED


def test_an_undo_command_that_has_left_is_not_cancelled() -> None:
    a_process_to_undo(steps=1)
    publish(Begun())
    deliver_due()
    publish(CalledOff())
    dispatch.deliver(delivery_of(CalledOff).pk)
    before = statuses_of(Undo)

    count = cancel_all()
    deliver_due()

    assert (before, count) == ([Status.PENDING], 0)
    assert undone() == [1]


# Rescheduling


def test_what_waits_for_its_time_is_handled_at_once() -> None:
    payments()
    send(Pay(amount=3), delay=timedelta(days=1))
    deliver_due()
    before = Note.objects.count()

    count = make_due(everything())
    deliver_due()

    assert (before, count) == (0, 1)
    assert Note.objects.get().text == "3"


def test_what_is_due_already_is_left_alone() -> None:
    payments()
    send(Pay(amount=3))

    assert make_due(everything()) == 0


def test_what_waits_for_its_instance_goes_on_waiting() -> None:
    workflow = define_workflow(TallyState)
    workflow.started_by(Begun, once_per="key")(lambda message, state, context: None)
    when = workflow.when(CalledOff, lookup="key", if_missing=wait(timedelta(hours=1)))
    when(lambda message, state, context: state.seen.append("called off"))
    publish(CalledOff())
    deliver_due()

    count = make_due(everything())
    deliver_due()
    publish(Begun())
    deliver_due()

    assert count == 0
    assert TallyState.objects.get().seen == ["called off"]


# Replay with another body


def test_an_edited_body_is_what_the_handler_gets_and_the_original_is_kept() -> None:
    failed = a_failed_payment()

    replayed = replay_edited(failed.pk, '{"amount": 7}')
    deliver_due()

    failed.refresh_from_db()
    assert replayed
    assert Note.objects.get().text == "7"
    assert failed.original_body == '{"amount":-1,"note":""}'
    assert failed.body == '{"amount":7,"note":""}'


def test_the_original_is_the_first_of_several_bodies() -> None:
    failed = a_failed_payment()

    replay_edited(failed.pk, '{"amount": -2}')
    deliver_due()
    replay_edited(failed.pk, '{"amount": 3}')

    failed.refresh_from_db()
    assert failed.original_body == '{"amount":-1,"note":""}'


@pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.HANDLED, Status.NOTED])
def test_what_cannot_be_replayed_keeps_its_body(status: Status) -> None:
    payments()
    row = stored(status=status, message_name="tests.Pay", handler="tests.pay", body='{"amount":1}')

    assert not replay_edited(row.pk, '{"amount": 2}')

    row.refresh_from_db()
    assert (row.status, row.body, row.original_body) == (status, '{"amount":1}', "")


def test_a_dropped_undo_command_keeps_its_body() -> None:
    payments()
    fields: dict[str, Any] = {"message_name": "tests.Pay", "handler": "tests.pay"}
    row = stored(status=Status.CANCELLED, undoes=True, body='{"amount":1}', **fields)

    assert not replay_edited(row.pk, '{"amount": 2}')

    row.refresh_from_db()
    assert (row.status, row.body) == (Status.CANCELLED, '{"amount":1}')


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"amount": "much"}', "amount: Input should be a valid integer"),
        ("{}", "amount: Field required"),
        ("not json", "Invalid JSON"),
        ("[]", "the body: Input should be an object"),
        ('{"amount": 1, "notte": "x"}', "Pay has no field notte. It has amount, note."),
    ],
)
def test_a_body_that_does_not_fit_its_message_is_refused(body: str, says: str) -> None:
    failed = a_failed_payment()

    with pytest.raises(UnreadableBody, match=says.replace(".", r"\.")):
        replay_edited(failed.pk, body)

    failed.refresh_from_db()
    assert (failed.status, failed.original_body) == (Status.FAILED, "")


def test_a_field_that_the_body_had_all_along_may_stay() -> None:
    payments()
    row = stored(message_name="tests.Pay", handler="tests.pay", body='{"amount": -1, "gone": 1}')

    assert edited(row, '{"amount": 1, "gone": 1}') == '{"amount":1,"note":""}'


def test_a_body_of_a_message_that_nothing_declares_is_refused() -> None:
    row = stored(message_name="tests.Gone", handler="tests.gone")

    with pytest.raises(UnknownName, match=r"tests\.gone"):
        replay_edited(row.pk, "{}")


def test_a_body_that_is_too_large_is_refused(settings: Any) -> None:
    failed = a_failed_payment()
    settings.DJANGO_WORKFLOWS = {"MAX_BODY_BYTES": 100}

    with pytest.raises(TooLarge):
        replay_edited(failed.pk, '{"amount": 1, "note": "' + "x" * 100 + '"}')


def test_what_the_database_would_refuse_is_refused_before() -> None:
    failed = a_failed_payment()

    with pytest.raises((NotSerialisable, UnreadableBody)):
        replay_edited(failed.pk, '{"amount": 1, "note": "\\ud800"}')


def test_two_edits_at_once_are_one_replay() -> None:
    failed = a_failed_payment()

    done = at_once(
        lambda: replay_edited(failed.pk, '{"amount": 1}'),
        lambda: replay_edited(failed.pk, '{"amount": 2}'),
    )
    deliver_due()

    assert sorted(done) == [False, True]
    assert Note.objects.count() == 1


# Going on with the undoing


def test_the_undoing_goes_on_where_it_stopped() -> None:
    a_process_to_undo(fails_at=2)
    instance = begun_and_called_off()
    handler = Delivery.objects.filter(undoes=True, status=Status.FAILED)
    handler.update(body='{"number": 20}')  # what made it fail is mended

    count = continue_compensation(instance)
    deliver_due()

    assert count == 1
    assert undone() == [3, 20, 1]
    assert TallyState.objects.get().lifecycle == Lifecycle.COMPENSATED


def test_where_nothing_has_stopped_nothing_goes_on() -> None:
    instance = ParcelState.objects.create()
    stored(sender_instance_id=instance.pk)
    stored(sender_instance_id=uuid4(), undoes=True)

    assert continue_compensation(instance) == 0


# In batches


def test_each_batch_is_reported_and_the_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "BATCH", 2)
    for _ in range(5):
        stored()
    batches: list[int] = []

    count = skip(
        everything(), reason="Seen to.", limit=3, on_batch=lambda rows: batches.append(len(rows))
    )

    assert (count, batches) == (3, [2, 1])
    assert Delivery.objects.filter(status=Status.FAILED).count() == 2
