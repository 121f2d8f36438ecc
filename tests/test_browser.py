"""Every page and action of ours in a real browser, under a strict content security policy."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    Unrecoverable,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
)
from django_workflows.admin import actions
from django_workflows.models import Delivery, Lifecycle, Status
from tests.browser import Browser
from tests.delivering import deliver_due, delivery_of
from tests.models import Note, ParcelState, TallyState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERIES = "/admin/django_workflows/delivery/"
Context = WorkflowContext[TallyState]


class Begun(Event, name="tests.BegunSeen"):
    key: str = "k"


class Pay(Command, name="tests.PaySeen"):
    amount: int = -1


class Overdue(Command, name="tests.OverdueSeen"):
    pass


class Undo(Command, name="tests.UndoSeen"):
    pass


@pytest.fixture(autouse=True)
def _under_a_strict_policy(settings: Any, browser: Browser) -> Iterator[None]:
    """No page may break it: a browser that refuses a script or a style says so."""
    settings.MIDDLEWARE = ["tests.policy.strict_policy", *settings.MIDDLEWARE]
    yield
    assert browser.problems() == []


@pytest.fixture
def held_up(own_registry: Any) -> TallyState:
    """An instance whose payment has failed, with a timeout and a noted undo command."""
    workflow = define_workflow(TallyState)

    @workflow.started_by(Begun, once_per="key")
    def begin(message: Begun, state: TallyState, context: Context) -> None:
        context.send(Pay())
        context.send(Overdue(), delay=timedelta(hours=1))
        context.compensate_with(Undo())

    @workflow.when(Overdue)
    def give_up(message: Overdue, state: TallyState, context: Context) -> None:
        context.compensate()

    @handles(Pay, name="tests.pay")
    def pay(message: Pay, context: HandlerContext) -> None:
        if message.amount < 0:
            raise Unrecoverable("a negative amount")
        Note.objects.create(text=str(message.amount))

    @handles(Undo, name="tests.undo")
    def undo(message: Undo, context: HandlerContext) -> None:
        raise Unrecoverable("it cannot be undone")

    publish(Begun())
    deliver_due()
    return TallyState.objects.get()


def page_of(row: Any) -> str:
    return f"/admin/{row._meta.app_label}/{row._meta.model_name}/{row.pk}/change/"


def test_from_what_holds_an_instance_up_to_its_mended_replay(
    browser: Browser,
    held_up: TallyState,
) -> None:
    browser.open(page_of(held_up))
    headline = browser.find(".workflows-headline").text
    browser.click(".workflows-now .workflows-lines a")
    browser.click("a[href$='/edit-body/']")
    browser.driver.execute_script(
        "document.querySelector('#workflows-body').value = arguments[0]", '{"amount": 7}'
    )
    browser.click("button.default")
    compared = browser.text
    browser.click("button[name=confirmed]")
    deliver_due()

    assert "It is held up" in headline
    assert '"amount": -1' in compared
    assert '"amount": 7' in compared
    assert "It will be handled again, with the edited body." in browser.text
    assert Note.objects.get().text == "7"


def test_tracebacks_are_folded_until_they_are_opened(
    browser: Browser,
    held_up: TallyState,
) -> None:
    stored(
        handler="tests.TallyState",
        instance_id=held_up.pk,
        error="KeyError: 'ink'",
        traceback="Traceback (most recent call last): it was here",
    )

    browser.open(page_of(held_up))
    folded = browser.text
    browser.find(".workflows-timeline details summary").click()

    assert "it was here" not in folded
    assert "it was here" in browser.text


def test_a_delivery_is_replayed_by_its_button(browser: Browser, held_up: TallyState) -> None:
    failed = delivery_of(Pay)

    browser.open(page_of(failed))
    browser.click("button[value=replay_selected]")
    asked = browser.text
    browser.click("input[type=submit].default")

    assert "What will happen" in asked
    assert browser.path == page_of(failed)
    assert delivery_of(Pay).status == Status.PENDING


def test_leaving_the_confirmation_changes_nothing(browser: Browser, held_up: TallyState) -> None:
    failed = delivery_of(Pay)

    browser.open(page_of(failed))
    browser.click("button[value=replay_selected]")
    browser.click("a.closelink")

    assert browser.path == page_of(failed)
    assert delivery_of(Pay).status == Status.FAILED


def test_a_delivery_is_skipped_with_a_reason(browser: Browser, held_up: TallyState) -> None:
    browser.open(page_of(delivery_of(Pay)))
    browser.click("button[value=skip_selected]")
    browser.find("#workflows-reason").send_keys("Paid in cash.")
    browser.click("input[type=submit].default")

    assert delivery_of(Pay).status == Status.HANDLED
    assert "Paid in cash." in browser.text


def test_a_timeout_is_cancelled(browser: Browser, held_up: TallyState) -> None:
    browser.open(page_of(delivery_of(Overdue)))
    browser.click("button[value=cancel_selected]")
    browser.click("input[type=submit].default")

    assert delivery_of(Overdue).status == Status.CANCELLED


def test_a_timeout_is_made_due_and_the_stopped_undoing_goes_on(
    browser: Browser,
    held_up: TallyState,
) -> None:
    browser.open(page_of(delivery_of(Overdue)))
    browser.click("button[value=make_due_selected]")
    browser.click("input[type=submit].default")
    deliver_due()
    browser.open(page_of(held_up))
    stopped = browser.find(".workflows-headline").text
    browser.click("button[value=continue_compensation]")
    browser.click("input[type=submit].default")

    assert "Its undoing has stopped" in stopped
    assert delivery_of(Undo).status == Status.PENDING
    assert browser.path == page_of(held_up)


def test_an_instance_is_cancelled(browser: Browser, held_up: TallyState) -> None:
    browser.open(page_of(held_up))
    browser.click("button[value=cancel_instances]")
    browser.find("input[name=cascade]").click()
    browser.click("input[type=submit].default")

    assert TallyState.objects.get().lifecycle == Lifecycle.CANCELLED
    assert "It has ended." in browser.text


def test_all_that_match_are_chosen_in_the_list_and_replayed_in_parts(
    browser: Browser,
    own_registry: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actions, "SECONDS_PER_PART", 0)
    handles(Pay, name="tests.pay")(lambda message, context: None)
    now = timezone.now()
    template = stored(message_name="tests.PaySeen", handler="tests.pay")
    copied = ("message_name", "body", "correlation_id", "handler", "status")
    given = {name: getattr(template, name) for name in copied}
    Delivery.objects.bulk_create(
        Delivery(message_id=Delivery().pk, created_at=now, due_at=now, ended_at=now, **given)
        for _ in range(1_200)
    )

    browser.open(f"{DELIVERIES}?status__exact=failed")
    browser.find("#action-toggle").click()
    browser.find(".actions .question a").click()
    browser.find("select[name=action] option[value=replay_selected]").click()
    browser.click(".actions button[name=index]")
    asked = browser.text
    browser.click("input[type=submit].default")
    browser.wait_for("1201 deliveries will be handled again.")

    assert "1201 deliveries" in asked
    assert Delivery.objects.filter(status=Status.PENDING).count() == 1_201
    assert LogEntry.objects.count() == 1_201


def test_the_pages_of_an_instance_and_of_its_timeline(
    browser: Browser,
    own_registry: Any,
) -> None:
    define_workflow(ParcelState)
    instance = ParcelState.objects.create()
    for _ in range(45):
        stored(handler="tests.ParcelState", instance_id=instance.pk, status=Status.HANDLED)

    browser.open(page_of(instance))
    newest = browser.count(".workflows-entry")
    browser.click(".workflows-pages a")
    older = browser.count(".workflows-entry")
    browser.click(".workflows-pages a[href^='?timeline=1']")

    assert (newest, older) == (40, 5)
    assert browser.count(".workflows-entry") == 40


NASTY = '<script>window.taken = 1</script><img src=x onerror="window.taken = 1">'
RIGHT_TO_LEFT = "\u202eطلب مدفوع\u202c"


@pytest.mark.parametrize("width", [1280, 400])
def test_nasty_long_and_right_to_left_text_does_no_harm(
    width: int,
    browser: Browser,
    own_registry: Any,
) -> None:
    define_workflow(ParcelState)
    text = NASTY + RIGHT_TO_LEFT + "x" * 5_000
    instance = ParcelState.objects.create(customer=text[:100], seen=[text])
    delivery = stored(
        message_name=(NASTY + "x" * 200)[:200],
        handler="tests.ParcelState",
        instance_id=instance.pk,
        sender=(RIGHT_TO_LEFT + "y" * 200)[:200],
        error=text,
        reason=text,
        traceback=text,
        body='{"' + "z" * 5_000 + '": "' + RIGHT_TO_LEFT + '"}',
        changes={text[:300]: [text, text]},
        failures=[{"attempt": 1, "at": "2026-03-01", "error": text}],
    )
    browser.driver.set_window_size(width, 900)

    for path in (page_of(instance), page_of(delivery)):
        browser.open(path)

        assert browser.driver.execute_script("return window.taken") is None
        content = browser.find("#content")
        wide = "return arguments[0].scrollWidth > arguments[0].clientWidth + 1"
        assert not browser.driver.execute_script(wide, content), path
    browser.driver.set_window_size(1280, 900)
