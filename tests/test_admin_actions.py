"""What can be done in the admin, by whom, what it says before, and what it leaves behind."""

import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from django_workflows import Command, Event, HandlerContext, Unrecoverable, handles, send
from django_workflows.admin import actions
from django_workflows.models import Delivery, Lifecycle, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import InvoiceState, Note, TallyState
from tests.pages import buttons_on, confirm, press, select, submit
from tests.stored import many_failed, stored

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERIES = "/admin/django_workflows/delivery/"
TALLIES = "/admin/tests/tallystate/"


class Pay(Command, name="tests.Pay"):
    amount: int


class Undo(Command, name="tests.UndoAct"):
    number: int


class Begun(Event, name="tests.BegunAct"):
    key: str = "k"


LogIn = Callable[..., Client]


@pytest.fixture
def log_in(client: Client) -> LogIn:
    """`log_in("view_delivery", ...)` as somebody with these permissions alone."""

    def log_in_with(*permissions: str) -> Client:
        user = User.objects.create_user("somebody", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client.force_login(user)
        return client

    return log_in_with


def page_of(delivery: Delivery) -> str:
    return f"{DELIVERIES}{delivery.pk}/change/"


def page_of_instance(instance: Any) -> str:
    return f"/admin/tests/{instance._meta.model_name}/{instance.pk}/change/"


def later() -> Any:
    return timezone.now() + timedelta(hours=1)


def waiting_delivery() -> Delivery:
    return stored(status=Status.PENDING, due_at=later())


def an_instance() -> TallyState:
    return TallyState.objects.create(key="k")


def a_stopped_instance() -> TallyState:
    instance = TallyState.objects.create(key="k", lifecycle=Lifecycle.FAILED)
    stored(sender="tests.TallyState", sender_instance_id=instance.pk, undoes=True)
    return instance


# Who may do what: the action, its permission, a row that it fits, and what it makes of it

ON_DELIVERIES = [
    ("replay_selected", "replay_delivery", stored, Status.PENDING),
    ("skip_selected", "skip_delivery", stored, Status.HANDLED),
    ("cancel_selected", "cancel_delivery", waiting_delivery, Status.CANCELLED),
    ("make_due_selected", "reschedule_delivery", waiting_delivery, Status.PENDING),
]
ON_INSTANCES = [
    ("cancel_instances", "cancel_instance", an_instance, Lifecycle.CANCELLED),
    ("continue_compensation", "compensate_instance", a_stopped_instance, Lifecycle.FAILED),
]


@pytest.mark.parametrize(("action", "permission", "make", "becomes"), ON_DELIVERIES)
def test_who_has_the_permission_does_it_from_the_list_after_a_confirmation(
    action: str, permission: str, make: Callable[[], Delivery], becomes: str, log_in: LogIn
) -> None:
    delivery = make()
    client = log_in("view_delivery", permission)

    asked = select(client, DELIVERIES, action, [delivery.pk])
    before = Delivery.objects.values().get()
    confirm(client, asked, reason="It was seen to.")

    after = Delivery.objects.values().get()
    assert "What will happen" in asked.text
    assert before["status"] == delivery.status
    assert after["status"] == becomes
    assert after != before
    [entry] = LogEntry.objects.all()
    assert (entry.object_id, entry.user.get_username()) == (str(delivery.pk), "somebody")


@pytest.mark.parametrize(("action", "permission", "make", "becomes"), ON_DELIVERIES)
def test_who_has_the_permission_does_it_on_the_page_of_one(
    action: str, permission: str, make: Callable[[], Delivery], becomes: str, log_in: LogIn
) -> None:
    delivery = make()
    client = log_in("view_delivery", permission)

    page = client.get(page_of(delivery))
    done = confirm(client, press(client, page, action), reason="It was seen to.")

    assert buttons_on(page) == [action]
    assert Delivery.objects.get().status == becomes
    assert done.redirect_chain[-1][0] == page_of(delivery)


@pytest.mark.parametrize(("action", "permission", "make", "becomes"), ON_DELIVERIES)
def test_who_lacks_the_permission_is_not_offered_it_and_is_refused(
    action: str, permission: str, make: Callable[[], Delivery], becomes: str, log_in: LogIn
) -> None:
    delivery = make()
    others = [one for _action, one, _make, _becomes in ON_DELIVERIES if one != permission]
    client = log_in("view_delivery", *others)
    before = Delivery.objects.values().get()

    page, listed = client.get(page_of(delivery)), client.get(DELIVERIES)
    select(client, DELIVERIES, action, [delivery.pk])
    forged = {"confirmed": timezone.now().isoformat(), "reason": "x"}
    client.post(
        DELIVERIES, {"action": action, "_selected_action": delivery.pk, "index": "0", **forged}
    )

    assert action not in buttons_on(page)
    assert f'value="{action}"' not in listed.text
    assert Delivery.objects.values().get() == before
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(("action", "permission", "make", "becomes"), ON_INSTANCES)
@pytest.mark.parametrize("from_list", [True, False])
def test_who_has_the_permission_does_it_to_instances(
    action: str,
    permission: str,
    make: Callable[[], TallyState],
    becomes: str,
    from_list: bool,
    log_in: LogIn,
    declared: None,
) -> None:
    instance = make()
    client = log_in("view_tallystate", permission)

    if from_list:
        asked = select(client, TALLIES, action, [instance.pk])
    else:
        asked = press(client, client.get(page_of_instance(instance)), action)
    confirm(client, asked)

    assert TallyState.objects.get().lifecycle == becomes
    assert not Delivery.objects.filter(status=Status.FAILED).exists()
    [entry] = LogEntry.objects.all()
    assert entry.object_id == str(instance.pk)


@pytest.mark.parametrize(("action", "permission", "make", "becomes"), ON_INSTANCES)
def test_who_lacks_the_permission_is_refused_on_instances(
    action: str,
    permission: str,
    make: Callable[[], TallyState],
    becomes: str,
    log_in: LogIn,
    declared: None,
) -> None:
    instance = make()
    others = [one for _action, one, _make, _becomes in ON_INSTANCES if one != permission]
    client = log_in("view_tallystate", *others)

    page = client.get(page_of_instance(instance))
    select(client, TALLIES, action, [instance.pk])

    assert action not in buttons_on(page)
    assert TallyState.objects.get().lifecycle == instance.lifecycle
    assert not LogEntry.objects.exists()


@pytest.fixture
def declared(own_registry: Any) -> None:
    """Workflows on the states, with nothing but names."""
    from django_workflows import define_workflow

    define_workflow(TallyState)
    define_workflow(InvoiceState)


def test_a_visitor_who_may_only_look_is_offered_nothing(log_in: LogIn) -> None:
    delivery = stored()

    page = log_in("view_delivery").get(page_of(delivery))

    assert page.status_code == 200
    assert "workflows-buttons" not in page.text


@pytest.mark.parametrize(
    ("status", "offered"),
    [
        (Status.FAILED, {"replay_selected", "skip_selected"}),
        (Status.IGNORED, {"replay_selected"}),
        (Status.PENDING, {"skip_selected", "cancel_selected"}),
        (Status.NOTED, {"cancel_selected"}),
        (Status.RUNNING, set()),
        (Status.HANDLED, set()),
    ],
)
def test_only_what_fits_is_offered(status: Status, offered: set[str], admin_client: Client) -> None:
    delivery = stored(status=status)

    page = admin_client.get(page_of(delivery))

    assert set(buttons_on(page)) == offered


# What the confirmation says


def test_the_confirmation_says_how_many_of_which(admin_client: Client) -> None:
    rows = [stored() for _ in range(12)] + [stored(status=Status.IGNORED, handler="x.y")]
    handled = stored(status=Status.HANDLED)

    asked = select(
        admin_client, DELIVERIES, "replay_selected", [row.pk for row in (*rows, handled)]
    )

    text = re.sub(r"<[^>]+>|\s+", " ", asked.text)
    assert "Replay: 13 deliveries" in re.sub(" +", " ", text)
    assert re.search(r"orders\.TakePayment\s+orders\.take_payment\s+failed\s+12", text)
    assert re.search(r"orders\.TakePayment\s+x\.y\s+ignored\s+1", text)
    assert "1 of the selected does not fit, and stays as it is." in text


def test_a_few_are_shown_one_by_one_with_their_errors(admin_client: Client) -> None:
    delivery = stored(error="ValueError: no ink")

    asked = select(admin_client, DELIVERIES, "replay_selected", [delivery.pk])

    assert "ValueError: no ink" in asked.text
    assert page_of(delivery) in asked.text


def test_it_is_told_that_a_replay_would_fail_again(admin_client: Client) -> None:
    delivery = stored(body='{"amount": "much"}')

    asked = select(admin_client, DELIVERIES, "replay_selected", [delivery.pk])

    assert "As things are, it would fail again" in asked.text


def test_it_is_told_that_the_handler_has_no_transaction(
    own_registry: Any, admin_client: Client
) -> None:
    handles(Pay, name="tests.pay", atomic=False)(lambda message, context: None)
    delivery = stored(message_name="tests.Pay", handler="tests.pay")

    asked = select(admin_client, DELIVERIES, "replay_selected", [delivery.pk])

    assert "tests.pay runs without a transaction" in asked.text


def test_it_is_told_that_the_instance_has_ended(declared: None, admin_client: Client) -> None:
    from django_workflows import registry

    [workflow, *_] = registry.current().workflows
    from django_workflows.declarations import Step

    workflow.steps.append(Step(Pay, lambda message, state, context: None))
    registry.current().changed()
    instance = TallyState.objects.create(key="k", lifecycle=Lifecycle.COMPLETED)
    delivery = stored(
        message_name="tests.Pay",
        body='{"amount": 1}',
        handler="tests.TallyState",
        instance_id=instance.pk,
    )

    asked = select(admin_client, DELIVERIES, "replay_selected", [delivery.pk])

    assert "has ended (completed), so it would be ignored" in asked.text


def test_nothing_is_asked_where_nothing_fits(admin_client: Client) -> None:
    handled = stored(status=Status.HANDLED)

    response = select(admin_client, DELIVERIES, "replay_selected", [handled.pk])

    assert "Only failed, ignored and cancelled deliveries can be replayed." in response.text
    assert "Make due now brings it forward." in response.text


def test_what_happened_between_is_said(admin_client: Client) -> None:
    delivery = stored()
    asked = select(admin_client, DELIVERIES, "replay_selected", [delivery.pk])
    Delivery.objects.update(status=Status.HANDLED)

    response = confirm(admin_client, asked)

    assert "Only failed, ignored and cancelled deliveries can be replayed." in response.text
    assert "Make due now brings it forward." in response.text
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("confirmed", ["", "now", "x" * 1000, "2026-01-01"])
def test_a_confirmation_that_no_page_of_ours_sends_is_asked_again_or_changes_nothing(
    confirmed: str, admin_client: Client
) -> None:
    delivery = stored()

    data = {"action": "replay_selected", "_selected_action": delivery.pk, "index": "0"}
    response = admin_client.post(DELIVERIES, {**data, "confirmed": confirmed}, follow=True)

    assert response.status_code == 200
    assert Delivery.objects.get().status == Status.FAILED


# Reasons, and who gave them


def test_a_skip_needs_a_reason(admin_client: Client) -> None:
    delivery = stored()
    asked = select(admin_client, DELIVERIES, "skip_selected", [delivery.pk])

    again = submit(admin_client, asked, "confirmed", reason="  ")
    before = Delivery.objects.get().status
    confirm(admin_client, again, reason="Paid at the counter.")

    assert "Give a reason" in again.text
    assert before == Status.FAILED
    delivery.refresh_from_db()
    assert delivery.status == Status.HANDLED
    assert delivery.reason == "Handled by hand, says admin: Paid at the counter."
    assert "Paid at the counter." in LogEntry.objects.get().change_message


def test_a_cancellation_keeps_who_and_why(admin_client: Client) -> None:
    delivery = waiting_delivery()
    asked = select(admin_client, DELIVERIES, "cancel_selected", [delivery.pk])

    confirm(admin_client, asked, reason="Sent twice.")

    assert Delivery.objects.get().reason == "Cancelled by admin: Sent twice."


@pytest.mark.parametrize("cascade", [True, False])
def test_children_are_cancelled_if_that_is_asked(
    cascade: bool, declared: None, admin_client: Client
) -> None:
    parent = an_instance()
    InvoiceState.objects.create(starter_workflow="tests.TallyState", starter_id=parent.pk)
    stored(status=Status.PENDING, handler="tests.TallyState", instance_id=parent.pk, due_at=later())
    asked = select(admin_client, TALLIES, "cancel_instances", [parent.pk])

    confirm(admin_client, asked, reason="Fraud.", **({"cascade": "1"} if cascade else {}))

    expected = Lifecycle.CANCELLED if cascade else Lifecycle.RUNNING
    assert InvoiceState.objects.get().lifecycle == expected
    assert TallyState.objects.get().lifecycle == Lifecycle.CANCELLED
    assert Delivery.objects.get().reason == "Its instance was cancelled by admin: Fraud."


# Many, in parts


def test_ten_thousand_are_replayed_in_parts_each_once_though_interrupted_and_repeated(
    own_registry: Any, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: Counter[Any] = Counter()
    monkeypatch.setattr(actions, "SECONDS_PER_PART", 0)

    @handles(Pay, name="tests.pay")
    def pay(message: Pay, context: HandlerContext) -> None:
        handled[context.delivery_id] += 1

    many_failed(10_000, message_name="tests.Pay", handler="tests.pay", body='{"amount":1}')
    path = f"{DELIVERIES}?status__exact=failed"

    asked = select(admin_client, path, "replay_selected", [], across=True)
    first = submit(admin_client, asked, "confirmed")
    second = submit(admin_client, first, "confirmed")
    submit(admin_client, first, "confirmed")  # the same part again, as by the button for back
    left = Delivery.objects.filter(status=Status.FAILED).count()
    # The page is left here; somebody chooses what is left.
    done = confirm(admin_client, select(admin_client, path, "replay_selected", [], across=True))
    deliver_due(rounds=500)

    assert re.search(r"Replay:</strong>\s*10000 deliveries", asked.text)
    assert "<strong>500</strong> of 10000 done." in first.text
    assert "<strong>1000</strong> of 10000 done." in second.text
    assert left == 8_500
    assert "8500 deliveries will be handled again." in done.text
    assert len(handled) == 10_000
    assert set(handled.values()) == {1}
    assert LogEntry.objects.values("object_id").distinct().count() == 10_000
    assert LogEntry.objects.count() == 10_000


def test_what_fails_again_at_once_is_not_replayed_twice_by_one_confirmation(
    own_registry: Any, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "SECONDS_PER_PART", 0)
    runs: Counter[Any] = Counter()

    @handles(Pay, name="tests.pay")
    def pay(message: Pay, context: HandlerContext) -> None:
        runs[context.delivery_id] += 1
        raise Unrecoverable("still broken")

    many_failed(600, message_name="tests.Pay", handler="tests.pay", body='{"amount":1}')
    path = f"{DELIVERIES}?status__exact=failed"

    asked = select(admin_client, path, "replay_selected", [], across=True)
    first = submit(admin_client, asked, "confirmed")
    deliver_due()
    submit(admin_client, first, "confirmed")
    deliver_due()
    submit(admin_client, asked, "confirmed")  # the very first part again
    deliver_due()

    assert len(runs) == 600
    assert set(runs.values()) == {1}


def test_nothing_that_failed_after_the_confirmation_is_replayed(admin_client: Client) -> None:
    before = stored()
    path = f"{DELIVERIES}?status__exact=failed"
    asked = select(admin_client, path, "replay_selected", [], across=True)
    after = stored(ended_at=timezone.now() + timedelta(seconds=1))

    confirm(admin_client, asked)

    assert Delivery.objects.get(pk=before.pk).status == Status.PENDING
    assert Delivery.objects.get(pk=after.pk).status == Status.FAILED


def test_instances_are_cancelled_in_parts(
    declared: None, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "SECONDS_PER_PART", 0)
    for number in range(120):
        TallyState.objects.create(key=str(number))

    asked = select(admin_client, TALLIES, "cancel_instances", [], across=True)
    done = confirm(admin_client, asked)

    assert "120 instances were cancelled." in done.text
    assert TallyState.objects.filter(lifecycle=Lifecycle.CANCELLED).count() == 120
    assert LogEntry.objects.count() == 120


# Another body


@pytest.fixture
def failed_payment(own_registry: Any) -> Delivery:
    @handles(Pay, name="tests.pay")
    def pay(message: Pay, context: HandlerContext) -> None:
        if message.amount < 0:
            raise Unrecoverable("negative")
        Note.objects.create(text=str(message.amount))

    send(Pay(amount=-1))
    deliver_due()
    return delivery_of(Pay)


def edit_url(delivery: Delivery) -> str:
    return f"{DELIVERIES}{delivery.pk}/edit-body/"


def test_a_body_is_edited_checked_confirmed_and_handled(
    failed_payment: Delivery, log_in: LogIn
) -> None:
    client = log_in("view_delivery", "edit_delivery")

    page = client.get(page_of(failed_payment))
    form = client.get(edit_url(failed_payment))
    checked = submit(client, form, "body", body='{"amount": 5}')
    before = Delivery.objects.get()
    done = submit(client, checked, "body", confirmed="1")
    deliver_due()

    assert edit_url(failed_payment) in page.text
    assert "&quot;amount&quot;: -1" in checked.text
    assert "&quot;amount&quot;: 5" in checked.text
    assert (before.status, before.original_body) == (Status.FAILED, "")
    assert "It will be handled again, with the edited body." in done.text
    assert Note.objects.get().text == "5"
    assert "body as it was sent" in client.get(page_of(failed_payment)).text.lower()
    assert LogEntry.objects.get().change_message == "Replayed with an edited body."


def test_a_body_that_does_not_fit_says_why_and_keeps_what_was_typed(
    failed_payment: Delivery, admin_client: Client
) -> None:
    form = admin_client.get(edit_url(failed_payment))

    checked = submit(admin_client, form, "body", body='{"amount": "mu<h"}')
    forged = admin_client.post(
        edit_url(failed_payment), {"body": '{"amount": "mu<h"}', "confirmed": "1"}
    )

    for response in (checked, forged):
        assert "amount: Input should be a valid integer" in response.text
        assert "mu&lt;h" in response.text
    assert Delivery.objects.get().status == Status.FAILED


def test_one_can_go_back_to_editing(failed_payment: Delivery, admin_client: Client) -> None:
    form = admin_client.get(edit_url(failed_payment))
    checked = submit(admin_client, form, "body", body='{"amount": 5}')

    again = submit(admin_client, checked, "body", again="1")

    assert "Check it" in again.text
    assert "{&quot;amount&quot;: 5}" in again.text


def test_who_may_only_replay_edits_nothing(failed_payment: Delivery, log_in: LogIn) -> None:
    client = log_in("view_delivery", "replay_delivery")

    page = client.get(page_of(failed_payment))
    answers = [
        client.get(edit_url(failed_payment)),
        client.post(edit_url(failed_payment), {"body": '{"amount": 5}', "confirmed": "1"}),
    ]

    assert "edit-body" not in page.text
    assert [answer.status_code for answer in answers] == [403, 403]
    assert Delivery.objects.get().body == '{"amount":-1}'


@pytest.mark.parametrize("wanted", [uuid4(), "nonsense"])
def test_there_is_no_body_to_edit_of_what_does_not_exist(wanted: Any, admin_client: Client) -> None:
    assert admin_client.get(f"{DELIVERIES}{wanted}/edit-body/").status_code == 404


def test_what_has_been_replayed_meanwhile_keeps_its_body(
    failed_payment: Delivery, admin_client: Client
) -> None:
    form = admin_client.get(edit_url(failed_payment))
    checked = submit(admin_client, form, "body", body='{"amount": 5}')
    Delivery.objects.update(status=Status.HANDLED)

    submit(admin_client, checked, "body", confirmed="1")

    assert Delivery.objects.get().body == '{"amount":-1}'
