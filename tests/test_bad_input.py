"""What people get wrong: one clear sentence, nothing that was stored is lost, the worker lives.

More of it stands where it belongs: values in test_messages, settings and declarations in
test_checks, terms in test_delays, attributes and verbs in test_sending, unknown names and broken
bodies in test_unreadable, keys in test_finding.
"""

import logging
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import override_settings

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    WorkflowContext,
    attribute,
    conf,
    define_workflow,
    handles,
    publish,
    send,
)
from django_workflows.broker import dramatiq_settings
from django_workflows.dispatch import deliver
from django_workflows.endings import Ending, Failed, Handled, Unknown
from django_workflows.errors import (
    LookupMismatch,
    MessageError,
    NotSerialisable,
    TooLarge,
    UnreadableBody,
)
from django_workflows.models import Delivery, Status
from tests.models import Note, ParcelState, TallyState
from tests.processes import environment, run_manage

database = pytest.mark.django_db(transaction=True)
own_registry = pytest.mark.usefixtures("own_registry")


class PrintLabel(Command):
    text: str = ""
    value: Any = None


class Scanned(Event):
    key: Any = None


def prints_labels() -> None:
    @handles(PrintLabel, name="tests.print_label")
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)


def tallies(**when: Any) -> None:
    """A workflow that Scanned starts or, with these options, continues."""
    workflow = define_workflow(TallyState)

    @workflow.started_by(PrintLabel, once_per="key", lookup="text")
    def start(message: PrintLabel, state: TallyState, context: WorkflowContext[Any]) -> None: ...

    @workflow.when(Scanned, **when)
    def tally(message: Scanned, state: TallyState, context: WorkflowContext[Any]) -> None:
        state.total += 1
        context.send(PrintLabel(text="another"))


def deliver_one() -> Ending | None:
    """Deliver the one row there is; an error that left `deliver` would fail the test."""
    return deliver(Delivery.objects.get().id)


# Values that cannot be stored


@database
@own_registry
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (Note(text="a model"), NotSerialisable),
        ({1, 2}, NotSerialisable),
        (open, NotSerialisable),
        ("\ud800", NotSerialisable),
        (float("nan"), NotSerialisable),
        ("a" * 2**20, TooLarge),
    ],
    ids=["model", "set", "function", "surrogate", "nan", "large"],
)
def test_what_cannot_be_stored_leaves_the_senders_transaction_whole(
    value: Any, error: type[Exception]
) -> None:
    prints_labels()

    with transaction.atomic():
        Note.objects.create(text="before")
        with pytest.raises(error, match="PrintLabel"):
            send(PrintLabel(), PrintLabel(value=value))
        send(PrintLabel(text="after"))

    assert Note.objects.get().text == "before"
    assert '"after"' in Delivery.objects.get().body


@database
@own_registry
def test_a_step_that_sends_what_cannot_be_stored_fails_and_changes_nothing() -> None:
    workflow = define_workflow(TallyState)

    @workflow.started_by(Scanned, once_per="key")
    def start(message: Scanned, state: TallyState, context: WorkflowContext[Any]) -> None:
        context.send(PrintLabel(value={1, 2}))

    prints_labels()
    publish(Scanned(key="a"))

    ending = deliver_one()

    assert isinstance(ending, Failed)
    delivery = Delivery.objects.get()
    assert delivery.status == Status.PENDING
    assert "PrintLabel.value is {1, 2} and would arrive as [1, 2]" in delivery.error
    assert not TallyState.objects.exists()


@database
@own_registry
@pytest.mark.parametrize(
    "delay", [timedelta.max, timedelta(days=365 * 9000), -timedelta(days=365 * 9000)]
)
def test_a_delay_beyond_the_calendar_is_an_error_for_the_sender(delay: timedelta) -> None:
    prints_labels()

    with transaction.atomic():
        with pytest.raises(MessageError, match=r"delay=.* calendar"):
            send(PrintLabel(), delay=delay)
        send(PrintLabel())

    assert Delivery.objects.count() == 1


@database
@own_registry
def test_a_time_that_is_beyond_the_calendar_elsewhere_is_an_error_for_the_sender() -> None:
    prints_labels()

    with pytest.raises(MessageError, match=r"at=.* calendar"):
        send(PrintLabel(), at=datetime.max.replace(tzinfo=ZoneInfo("America/New_York")))

    assert not Delivery.objects.exists()


@database
@own_registry
@pytest.mark.parametrize("at", [datetime.max, datetime.min])
def test_the_first_and_the_last_moment_can_be_stored(at: datetime) -> None:
    prints_labels()

    send(PrintLabel(), at=at.replace(tzinfo=UTC))

    assert Delivery.objects.get().status == Status.PENDING


@own_registry
@database
def test_an_event_without_a_handler_is_logged_and_stores_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "django_workflows"):
        ids = publish(Scanned())

    assert len(ids) == 1
    assert "Nothing reacts to the event Scanned." in caplog.text
    assert not Delivery.objects.exists()


# NUL


@database
@own_registry
def test_a_nul_in_a_body_arrives() -> None:
    seen: list[str] = []

    @handles(PrintLabel, name="tests.print_label")
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        seen.append(message.text)

    send(PrintLabel(text="a\x00b"))

    assert isinstance(deliver_one(), Handled)
    assert seen == ["a\x00b"]


@database
@own_registry
@pytest.mark.postgres
def test_a_nul_that_a_step_writes_fails_the_delivery_and_says_so() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(Scanned)
    def start(message: Scanned, state: ParcelState, context: WorkflowContext[Any]) -> None:
        state.customer = message.key

    publish(Scanned(key="a\x00b"))

    ending = deliver_one()

    assert isinstance(ending, Failed)
    assert "NUL" in Delivery.objects.get().error
    assert not ParcelState.objects.exists()


@database
@own_registry
@pytest.mark.parametrize("key", ["a\x00b", "\x00"])
def test_a_nul_in_a_key_harms_nobody(key: str) -> None:
    tallies(lookup="key", maps_to="key")
    publish(Scanned(key=key))

    ending = deliver_one()

    assert ending is not None
    assert Delivery.objects.get().status != Status.RUNNING
    assert Delivery.objects.get().reason


@database
@own_registry
@pytest.mark.parametrize("key", ["\ufffd", ["a"], {"a": 1}, 1.5])
def test_a_key_of_an_attribute_that_no_field_can_hold_fails_the_delivery(key: Any) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(PrintLabel)
    def start(message: PrintLabel, state: ParcelState, context: WorkflowContext[Any]) -> None: ...

    @workflow.when(Scanned, lookup=attribute("key"), maps_to="number")
    def scan(message: Scanned, state: ParcelState, context: WorkflowContext[Any]) -> None: ...

    publish(Scanned())
    Delivery.objects.update(attributes={"key": key})

    ending = deliver_one()

    assert isinstance(ending, Failed)
    assert isinstance(ending.error, LookupMismatch)
    assert Delivery.objects.get().status == Status.FAILED
    assert "tests.ParcelState.number, which is a IntegerField" in Delivery.objects.get().error


# Rows that somebody edited


@database
@own_registry
@pytest.mark.parametrize(
    "body", ["nonsense", "", "null", "[" * 100_000, '{"text": 5}', "\U0001f600"]
)
def test_a_body_edited_into_nonsense_fails_keeps_its_text_and_is_replayed(body: str) -> None:
    prints_labels()
    send(PrintLabel(text="right"))
    right = Delivery.objects.get().body
    Delivery.objects.update(body=body)

    ending = deliver_one()
    failed = Delivery.objects.get()
    Delivery.objects.update(body=right)
    Delivery.objects.all().replay()
    deliver_one()

    assert isinstance(ending, Failed)
    assert isinstance(ending.error, UnreadableBody)
    assert (failed.status, failed.body) == (Status.FAILED, body)
    assert "The stored body is not a valid PrintLabel" in failed.error
    assert "then replay the delivery" in failed.error
    assert Note.objects.get().text == "right"


@database
@own_registry
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("attributes", ["a list"]),
        ("attributes", "text"),
        ("sticky_attributes", 5),
        ("workflow_ids", []),
        ("workflow_ids", {"tests.TallyState": "no-uuid"}),
        ("workflow_ids", {"tests.TallyState": 5}),
        ("part", "no-uuid"),
    ],
)
def test_a_column_edited_into_nonsense_fails_the_delivery_and_loses_nothing(
    column: str, value: Any
) -> None:
    tallies(**({"lookup": attribute("key"), "maps_to": "key"} if "attr" in column else {}))
    publish(Scanned())
    body = Delivery.objects.get().body
    Delivery.objects.update(**{column: value})

    ending = deliver_one()

    delivery = Delivery.objects.get()
    assert isinstance(ending, Failed)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 1)
    assert (delivery.body, getattr(delivery, column)) == (body, value)
    assert delivery.error


@database
@own_registry
@pytest.mark.parametrize("column", ["handler", "message_name"])
@pytest.mark.parametrize("name", ["tests.nobody", "", "\u202e", "n" * 200])
def test_an_unknown_name_in_the_table_waits_for_a_worker_that_knows_it(
    column: str, name: str
) -> None:
    prints_labels()
    send(PrintLabel())
    Delivery.objects.update(**{column: name})

    ending = deliver_one()

    delivery = Delivery.objects.get()
    assert isinstance(ending, Unknown)
    assert (delivery.status, delivery.attempts) == (Status.PENDING, 0)
    assert f"named {name}. " in delivery.reason
    assert "add the old name to its aliases, then replay" in delivery.reason


@database
def test_a_wake_up_for_a_row_that_is_gone_does_nothing() -> None:
    assert deliver(uuid4()) is None


# Settings


@pytest.mark.parametrize("given", [{"ATTEMPS": 3}, None, "ATTEMPTS", ["ATTEMPTS"], {}])
def test_settings_that_a_check_refuses_leave_the_defaults_in_force(given: Any) -> None:
    with override_settings(DJANGO_WORKFLOWS=given):
        assert conf.current() == conf.Settings()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("kafka://me:secret@host/0", "'kafka://me:***@host/0' has the unknown scheme 'kafka'"),
        ("localhost:6379", "'localhost:6379'"),
        ("", "'' has the unknown scheme ''"),
        ("redis://host:port", "'redis://host:port' cannot be read"),
        ("redis://me:sec/ret@host", "'redis://me:***@host' cannot be read"),
        ("amqp://[::1", "'amqp://[::1' cannot be read"),
        ("sqs://host?password=secret", "'sqs://host' has the unknown scheme 'sqs'"),
    ],
)
def test_a_broker_url_that_makes_no_sense_is_an_error_without_its_password(
    url: str, shown: str
) -> None:
    with pytest.raises(ImproperlyConfigured) as raised:
        dramatiq_settings(url)

    assert shown in str(raised.value)
    assert "amqp://" in str(raised.value) or "percent-encoded" in str(raised.value)
    assert "sec" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("redis://me:secret@host", "redis", "redis"), ("amqp://me:secret@host", "pika", "rabbitmq")],
)
def test_a_broker_whose_package_is_missing_says_what_to_install(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ImproperlyConfigured) as raised:
        dramatiq_settings(url)

    assert str(raised.value) == (
        f"The broker URL {url.replace('secret', '***')!r} needs the package {package}: "
        f"pip install 'django-workflows[{extra}]'."
    )


def test_no_broker_url_at_all_is_an_error_in_one_sentence() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"The broker URL is None: give a text such as"):
        dramatiq_settings(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "begins"),
    [
        ("redis://", "redis://localhost?"),
        ("redis:///3", "redis://localhost/3?"),
        ("amqp://", "amqp://localhost?"),
        ("REDIS://host/3?socket_timeout=1", "redis://host/3?socket_timeout=1&"),
    ],
)
def test_a_broker_url_may_leave_out_the_host(url: str, begins: str) -> None:
    assert dramatiq_settings(url)["OPTIONS"]["url"].startswith(begins)


def manage(*arguments: str, url: str, broker_url: str = "db://") -> Any:
    env = environment(url, broker_url, {"DJANGO_SETTINGS_MODULE": "testproject.settings"})
    return run_manage(*arguments, env=env, check=False)


def test_a_command_on_a_broker_of_unknown_scheme_says_so_in_one_sentence() -> None:
    done = manage("check", url="sqlite:///unused.sqlite3", broker_url="kafka://me:secret@host")

    assert done.returncode != 0
    assert done.stderr.strip() == (
        "The broker URL 'kafka://me:***@host' has the unknown scheme 'kafka'. "
        "Use db://, redis://, rediss://, amqp:// or amqps://."
    )


@pytest.mark.parametrize("command", ["demo --orders 1", "place_orders 1"])
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://me:secret@127.0.0.1:1/orders", "postgres://me:***@127.0.0.1:1/orders"),
        ("sqlite:////no/such/directory/db.sqlite3", "sqlite:////no/such/directory/db.sqlite3"),
    ],
)
def test_a_database_that_cannot_be_reached_is_one_sentence(
    command: str, url: str, shown: str
) -> None:
    done = manage(*command.split(), url=url)

    assert done.returncode == 1
    assert done.stderr.startswith(f"CommandError: The database {shown} cannot be reached (")
    assert "Start it or correct DATABASE_URL" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("url", ["mysql://me:secret@host/orders", "orders.sqlite3"])
def test_a_database_of_another_kind_is_one_sentence(url: str) -> None:
    done = manage("demo", url=url)

    assert done.returncode == 1
    assert "which is neither SQLite nor Postgres. Set it to postgres://" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "secret" not in done.stderr
