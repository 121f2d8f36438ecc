"""The pages of an instance and of a delivery: what they say, to whom, and at what price."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from html import unescape
from typing import Annotated, Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Sensitive,
    Unrecoverable,
    WorkflowContext,
    cancel_instance,
    define_workflow,
    handles,
    publish,
)
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import InvoiceState, ParcelState, TallyState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERIES = "/admin/django_workflows/delivery/"
Context = WorkflowContext[TallyState]

NASTY = "<script>alert('1')</script>\u202eevil\u202c" + "x" * 120
LONG = "y" * 5_000


class Begun(Event, name="tests.BegunPage"):
    key: str = "k"


class Do(Command, name="tests.DoPage"):
    pass


class Done(Event, name="tests.DonePage"):
    pass


class Overdue(Command, name="tests.OverduePage"):
    pass


class Undo(Command, name="tests.UndoPage"):
    pass


class Pay(Command, name="tests.PayPage"):
    iban: Annotated[str, Sensitive()]


@pytest.fixture
def log_in(client: Client) -> Callable[..., Client]:
    def log_in_with(*permissions: str) -> Client:
        user = User.objects.create_user("somebody", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client.force_login(user)
        return client

    return log_in_with


def page_of(row: Any) -> str:
    return f"/admin/{row._meta.app_label}/{row._meta.model_name}/{row.pk}/change/"


def read(client: Client, path: str) -> str:
    """What is to be read on the page, on one line."""
    response = client.get(path)
    assert response.status_code == 200
    text = re.sub(r"<[^>]+>", " ", response.text)
    return re.sub(r"\s+", " ", unescape(text))


def queries_of(client: Client, path: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path).status_code == 200
    return len(captured)


def a_process(do: Callable[[Do, HandlerContext], None]) -> None:
    workflow = define_workflow(TallyState)
    handles(Do, name="tests.do", attempts=1)(do)
    handles(Undo, name="tests.undo")(lambda message, context: None)

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.send(Do())
        context.send(Overdue(), delay=timedelta(hours=1))
        context.compensate_with(Undo())

    @workflow.when(Done)
    def go_on(message: Done, state: TallyState, context: Context) -> None:
        state.total += 1

    @workflow.when(Overdue)
    def give_up(message: Overdue, state: TallyState, context: Context) -> None: ...


def begun() -> TallyState:
    publish(Begun())
    deliver_due()
    return TallyState.objects.get()


def answers(message: Do, context: HandlerContext) -> None:
    context.reply(Done())


def fails(message: Do, context: HandlerContext) -> None:
    raise Unrecoverable("out of ink")


# An instance


def test_the_page_says_what_happened_in_order(own_registry: Any, admin_client: Client) -> None:
    a_process(answers)
    instance = begun()

    text = read(admin_client, page_of(instance))

    assert re.search(
        r"Timeline .* started it tests\.BegunPage by step begin from outside · version 1 .*"
        r"key \"\" → k sent tests\.DoPage to tests\.do handled .*"
        r"noted tests\.UndoPage to tests\.undo noted .*"
        r"handled tests\.DonePage by step go_on from tests\.do · version 2 total 0 → 1 "
        r"due .* pending tests\.OverduePage from its own step begin",
        text,
    )


def test_the_page_says_what_holds_the_instance_up(own_registry: Any, admin_client: Client) -> None:
    a_process(fails)
    instance = begun()

    text = read(admin_client, page_of(instance))

    assert "It is held up: something that it needs has failed." in text
    assert re.search(r"this holds it up tests\.DoPage to tests\.do failed .* out of ink", text)
    assert re.search(r"Timeouts tests\.OverduePage .* due", text)
    assert "Steps not reached yet go_on @when(Done); give_up @when(Overdue)" in text
    assert re.search(r"Noted to undo tests\.UndoPage to tests\.undo noted", text)


def test_the_page_of_one_that_has_ended_says_so(own_registry: Any, admin_client: Client) -> None:
    a_process(answers)
    cancel_instance(begun(), reason="Fraud.")

    text = read(admin_client, page_of(TallyState.objects.get()))

    assert "cancelled It has ended." in text
    assert "Steps not reached yet" not in text
    assert "Fraud." in text


def test_a_failed_step_has_its_traceback_folded(own_registry: Any, admin_client: Client) -> None:
    a_process(answers)
    instance = begun()
    failures = [{"at": "2026-03-01T09:00:00+00:00", "attempt": 1, "error": "KeyError: 'ink'"}]
    stored(
        handler="tests.TallyState",
        instance_id=instance.pk,
        error="KeyError: 'ink'",
        traceback="Traceback (most recent call last):\n  line 1",
        failures=failures,
        attempts=1,
    )

    response = admin_client.get(page_of(instance))

    assert re.search(
        r"<details><summary>Traceback</summary><pre class=\"workflows-block\">Traceback",
        response.text,
    )
    assert re.search(r"<summary>1 failed attempt</summary>.*2026-03-01 09:00:00", response.text)


def test_the_page_leads_to_parent_children_neighbours_and_the_conversation(
    own_registry: Any, admin_client: Client
) -> None:
    a_process(answers)
    define_workflow(InvoiceState)
    define_workflow(ParcelState)
    instance = begun()
    parent = InvoiceState.objects.create()
    TallyState.objects.update(starter_workflow="tests.InvoiceState", starter_id=parent.pk)
    child = InvoiceState.objects.create(starter_workflow="tests.TallyState", starter_id=instance.pk)
    other = ParcelState.objects.create()
    cause = delivery_of(Begun)
    stored(correlation_id=cause.correlation_id, handler="tests.ParcelState", instance_id=other.pk)

    response = admin_client.get(page_of(instance))

    for relative in (parent, child, other):
        assert f'href="{page_of(relative)}"' in response.text
    assert f"{DELIVERIES}?q={cause.correlation_id}" in response.text


def test_a_long_timeline_has_pages(own_registry: Any, admin_client: Client) -> None:
    define_workflow(ParcelState)
    instance = ParcelState.objects.create()
    rows = [stored(instance_id=instance.pk) for _ in range(100)]

    first = admin_client.get(page_of(instance))
    second = admin_client.get(f"{page_of(instance)}?timeline=2")
    third = admin_client.get(f"{page_of(instance)}?timeline=3")

    found = [
        set(re.findall(r"workflows-what\">\s*<p>.*?/delivery/([0-9a-f-]{36})/", page.text))
        for page in (third, second, first)
    ]
    assert [len(pks) for pks in found] == [20, 40, 40]
    assert set().union(*found) == {str(row.pk) for row in rows}
    assert "?timeline=2#workflows-timeline" in first.text
    assert "?timeline=1#workflows-timeline" in second.text


@pytest.mark.parametrize("page", ["0", "-1", "x", "9" * 30, "99999"])
def test_a_page_of_the_timeline_that_cannot_be_shows_no_error(
    page: str, admin_client: Client
) -> None:
    instance = ParcelState.objects.create()

    assert admin_client.get(f"{page_of(instance)}?timeline={page}").status_code == 200


def test_an_instance_of_which_everything_is_large_is_a_page_of_bounded_size_and_queries(
    own_registry: Any, log_in: Callable[..., Client]
) -> None:
    define_workflow(ParcelState)
    define_workflow(TallyState)
    define_workflow(InvoiceState)
    instance = ParcelState.objects.create(customer=NASTY[:100], seen=["z" * 10_000] * 100)
    for number in range(60):
        cause = uuid4()
        stored(
            message_id=cause,
            handler="tests.ParcelState",
            instance_id=instance.pk,
            sender=NASTY,
            reason=LONG,
            error=LONG,
            traceback='"<&>' * 20_000,
            failures=[{"attempt": n, "at": "2026-03-01", "error": LONG} for n in range(10)],
            changes={f"field{n}": [LONG, LONG] for n in range(30)},
            status=Status.HANDLED if number % 2 else Status.FAILED,
        )
        for _ in range(9):
            stored(
                sender="tests.ParcelState",
                sender_instance_id=instance.pk,
                causation_id=cause,
                error=LONG,
                message_name=NASTY,
            )
    for _ in range(100):
        InvoiceState.objects.create(starter_workflow="tests.ParcelState", starter_id=instance.pk)
    client = log_in("view_parcelstate", "view_delivery", "view_invoicestate", "cancel_instance")
    client.get(page_of(instance))

    queries = queries_of(client, page_of(instance))
    response = client.get(page_of(instance))

    assert queries <= 12
    assert len(response.content) <= 300 * 1024


# A delivery


def test_the_page_of_a_delivery_leads_to_its_cause_and_its_effects(
    own_registry: Any, admin_client: Client
) -> None:
    a_process(answers)
    begun()
    start, do, done = delivery_of(Begun), delivery_of(Do), delivery_of(Done)

    of_start, of_do, of_done = (
        admin_client.get(page_of(delivery)).text for delivery in (start, do, done)
    )

    assert page_of(do) in of_start
    assert page_of(start) in of_do
    assert page_of(done) in of_do
    assert page_of(do) in of_done
    assert page_of(start) not in of_done


def test_the_page_of_a_delivery_leads_to_the_same_message_for_others(
    admin_client: Client,
) -> None:
    message_id = uuid4()
    first = stored(message_id=message_id, handler="a.a")
    second = stored(message_id=message_id, handler="b.b")

    text = admin_client.get(page_of(first)).text

    assert page_of(second) in text


def test_the_page_of_a_delivery_shows_headers_and_attempts(admin_client: Client) -> None:
    failures = [
        {"at": f"2026-03-0{n}T09:00:00+00:00", "attempt": n, "error": f"KeyError: {n}"}
        for n in (1, 2)
    ]
    delivery = stored(
        failures=failures, attributes={"tenant": "acme"}, sticky_attributes={"trace": "t-1"}
    )

    text = read(admin_client, page_of(delivery))

    assert re.search(r"2 2026-03-02 09:00:00 KeyError: 2 1 2026-03-01 09:00:00 KeyError: 1", text)
    for header in ('"tenant": "acme"', '"trace": "t-1"', str(delivery.message_id)):
        assert header in text
    assert queries_of(admin_client, page_of(delivery)) <= 12


@pytest.mark.parametrize(
    "failures", [["nonsense"], [{}], [{"at": None, "error": 3}], [{"at": "2026-99-99"}]]
)
def test_whatever_the_attempts_hold_is_shown(failures: Any, admin_client: Client) -> None:
    delivery = stored(failures=failures)

    assert admin_client.get(page_of(delivery)).status_code == 200


# What is nasty


def test_whatever_rows_hold_is_harmless_everywhere(own_registry: Any, admin_client: Client) -> None:
    define_workflow(ParcelState)
    instance = ParcelState.objects.create(customer=NASTY[:100], seen=[NASTY])
    cause = uuid4()
    fields: dict[str, Any] = {
        "handler": "tests.ParcelState",
        "instance_id": instance.pk,
        "sender": NASTY,
        "sender_instance_id": uuid4(),
        "step": NASTY,
        "reason": NASTY,
        "error": f"ValueError: {NASTY}",
        "traceback": NASTY,
        "body": json.dumps({NASTY: NASTY}),
        "original_body": json.dumps({NASTY: NASTY}),
        "attributes": {NASTY: NASTY},
        "failures": [{"attempt": NASTY, "at": NASTY, "error": NASTY}],
        "changes": {NASTY: [NASTY, {NASTY: NASTY}]},
        "message_name": NASTY,
    }
    delivery = stored(message_id=cause, **fields)
    stored(**{**fields, "status": Status.PENDING})
    stored(**{**fields, "sender_instance_id": instance.pk, "causation_id": cause})
    stored(**{**fields, "handler": NASTY, "message_id": cause})
    pages = [
        page_of(instance),
        page_of(delivery),
        f"{DELIVERIES}{delivery.pk}/edit-body/",
        DELIVERIES,
    ]
    texts = [admin_client.get(path).text for path in pages]
    action = {"action": "replay_selected", "_selected_action": str(delivery.pk), "index": "0"}
    texts.append(admin_client.post(DELIVERIES, action).text)

    for text in texts:
        assert "alert(" in text
        assert "<script>alert" not in text
        scripts = re.findall(r"<script[^>]*>", text)
        assert all("src=" in script for script in scripts)
        assert not re.search(r"\son\w+=|javascript:|\sstyle=", text)


def test_a_body_with_lone_surrogates_can_be_edited(admin_client: Client) -> None:
    delivery = stored(body=r'{"text": "\ud800"}')

    response = admin_client.get(f"{DELIVERIES}{delivery.pk}/edit-body/")

    assert r"\ud800" in response.text


# What not everybody may see


@pytest.fixture
def secret(own_registry: Any, monkeypatch: pytest.MonkeyPatch) -> TallyState:
    """An instance and a delivery with an IBAN in every place where one can be."""
    monkeypatch.setattr(TallyState, "sensitive_fields", ("key",))
    workflow = define_workflow(TallyState)
    workflow.started_by(Pay)(lambda message, state, context: None)
    handles(Pay, name="tests.pay")(lambda message, context: None)
    instance = TallyState.objects.create(key="DE89IBAN", seen=["x"])
    for handler, pk in (("tests.TallyState", instance.pk), ("tests.pay", None)):
        stored(
            message_name="tests.PayPage",
            handler=handler,
            instance_id=pk,
            body='{"iban": "DE89IBAN"}',
            original_body='{"iban": "DE89IBAN"}',
            error="ValueError: DE89IBAN is wrong",
            reason="ValueError: DE89IBAN is wrong",
            traceback="raise ValueError('DE89IBAN')",
            failures=[{"attempt": 1, "at": "2026-03-01", "error": "ValueError: DE89IBAN"}],
            changes={"key": ["", "DE89IBAN"]} if pk else None,
        )
    return instance


def pages_with_secrets(instance: TallyState) -> list[str]:
    rows = [page_of(row) for row in (instance, *Delivery.objects.all())]
    return [*rows, DELIVERIES, "/admin/tests/tallystate/"]


LOOKS = ("view_delivery", "view_tallystate", "replay_delivery", "edit_delivery")


def test_what_is_sensitive_is_masked_on_every_page(
    secret: TallyState, log_in: Callable[..., Client]
) -> None:
    client = log_in(*LOOKS)

    for path in pages_with_secrets(secret):
        response = client.get(path)

        assert response.status_code == 200
        assert "DE89IBAN" not in response.text, path


@pytest.mark.parametrize("may_see", [True, False])
def test_only_who_may_see_a_field_finds_rows_by_it(
    may_see: bool, secret: TallyState, log_in: Callable[..., Client]
) -> None:
    client = log_in(*LOOKS, *(["view_sensitive"] if may_see else []))

    response = client.get("/admin/tests/tallystate/?q=DE89IBAN")

    assert len(response.context["cl"].result_list) == may_see


def test_a_confirmation_masks_what_is_sensitive(
    secret: TallyState, log_in: Callable[..., Client]
) -> None:
    client = log_in(*LOOKS)
    pks = [str(row.pk) for row in Delivery.objects.all()]

    data = {"action": "replay_selected", "_selected_action": pks, "index": "0"}
    response = client.post(DELIVERIES, data)

    assert "What will happen" in response.text
    assert "DE89IBAN" not in response.text


def test_who_may_not_see_a_body_cannot_edit_it(
    secret: TallyState, log_in: Callable[..., Client]
) -> None:
    client = log_in(*LOOKS)
    delivery = Delivery.objects.get(handler="tests.pay")

    answer = client.get(f"{DELIVERIES}{delivery.pk}/edit-body/")

    assert answer.status_code == 403


def test_who_may_see_it_sees_it(secret: TallyState, log_in: Callable[..., Client]) -> None:
    client = log_in(*LOOKS, "view_sensitive")

    for path in pages_with_secrets(secret)[:3]:
        assert "DE89IBAN" in client.get(path).text, path


# What is read


def test_the_time_of_a_failure_is_told_as_how_long_ago(
    own_registry: Any, admin_client: Client
) -> None:
    define_workflow(ParcelState)
    instance = ParcelState.objects.create()
    ago = timezone.now() - timedelta(hours=3)
    stored(handler="tests.ParcelState", instance_id=instance.pk, ended_at=ago)

    assert "(3 hours ago)" in read(admin_client, page_of(instance))
