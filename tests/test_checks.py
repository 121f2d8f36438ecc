"""Wrong declarations and settings are found by `manage.py check`; right ones raise nothing."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings as django_settings
from django.contrib.postgres.indexes import GinIndex
from django.core.checks import CheckMessage, Error
from django.core.checks.registry import registry as checks_registry
from django.db import connection, connections, models
from django.db.models import Deferrable, Q
from django.db.models.signals import post_save
from django.db.utils import ConnectionHandler
from django.test import override_settings
from django.test.utils import isolate_apps, modify_settings
from django.utils.module_loading import import_string
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from django_workflows import (
    Command,
    Event,
    Workflow,
    attribute,
    define_workflow,
    handles,
    on_failure,
    outbox,
    started_by,
    when,
    when_all,
)
from django_workflows.actors import DramatiqTransport
from django_workflows.broker import dramatiq_settings
from django_workflows.checks import TAG, check_connection, databases
from django_workflows.errors import DeclarationError
from django_workflows.models import WorkflowState, WorkflowStateQuerySet
from django_workflows.testing import isolated_registry
from tests.models import TallyState
from tests.processes import ROOT, environment, run_manage


class Opened(Event):
    key: str
    number: int = 0
    day: date = date(2026, 1, 1)
    id: UUID | None = None
    amount: Decimal | None = None
    tags: list[str] = []  # noqa: RUF012  pydantic copies it


class Noted(Event):
    key: str
    day: date = date(2026, 1, 1)


class Remind(Command):
    key: str = ""


OUTSIDE = "somewhere.else"


# The pairs: each declares something wrong, or with right=True its correct twin.


@dataclass
class Pair:
    id: str
    #: What the text must name, and what the remedy must name.
    names: str
    remedy: str
    declare: Callable[[bool], Any]


PAIRS: list[Any] = []


def pair(id: str, names: str, remedy: str) -> Callable[[Any], Any]:
    def add(declare: Callable[[bool], Any]) -> Callable[[bool], Any]:
        PAIRS.append(pytest.param(Pair(id, names, remedy, declare), id=declare.__name__))
        return declare

    return add


def ignore(*_arguments: Any) -> None: ...


def step(message: Any, state: Any, context: Any) -> None: ...


def handler(message: Any, context: Any) -> None: ...


def started(state: type[WorkflowState]) -> Any:
    """A workflow on this state that is right so far."""
    workflow = define_workflow(state)
    workflow.started_by(Opened)(step)
    return workflow


def keyed(**options: Any) -> type[WorkflowState]:
    """A state with a text field `key`, declared with these options."""

    class KeyedState(WorkflowState):
        key = models.CharField(max_length=50, **options)

    return KeyedState


def keyed_with(**meta: Any) -> type[WorkflowState]:
    """A state with a text field `key`, and this `class Meta`."""

    class KeyedState(WorkflowState):
        key = models.CharField(max_length=50)
        other = models.CharField(max_length=50)
        Meta = type("Meta", (), meta)

    return KeyedState


# Names


@pair("E001", "tests.test_checks.handler", "name=")
def two_handlers_of_one_name(right: bool) -> None:
    handles(Opened)(handler)
    handles(Noted, name="tests.other" if right else None)(handler)


@pair("E001", "'tests.former'", "alias")
def an_alias_that_is_another_handlers_name(right: bool) -> None:
    handles(Opened, name="tests.former")(handler)
    handles(Noted, aliases=["tests.older" if right else "tests.former"])(handler)


@pair("E001", "FirstState", "workflow_name")
def two_workflows_of_one_name(right: bool) -> None:
    class FirstState(WorkflowState):
        workflow_name = "tests.fulfilment"

    class SecondState(WorkflowState):
        workflow_name = "tests.second" if right else "tests.fulfilment"

    started(FirstState)
    started(SecondState)


@pair("E001", "SecondState", "workflow_name")
def a_workflows_alias_that_is_anothers_name(right: bool) -> None:
    class FirstState(WorkflowState):
        pass

    class SecondState(WorkflowState):
        workflow_aliases = () if right else ("tests.FirstState",)

    started(FirstState)
    started(SecondState)


@pair("E002", "tests.test_checks.two_messages_of_one_name.<locals>.Second", "name=")
def two_messages_of_one_name(right: bool) -> None:
    class First(Event, name="tests.Placed"):
        pass

    class Second(Event, name="tests.Second" if right else "tests.Placed"):
        pass

    handles(First, name="tests.one")(handler)
    handles(Second, name="tests.two")(handler)


@pair("E002", "Renamed", "alias")
def an_alias_that_is_another_messages_name(right: bool) -> None:
    class Renamed(Event, aliases=["tests.Older" if right else "tests.Noted"]):
        pass

    handles(Renamed, name="tests.one")(handler)
    handles(Noted, name="tests.two")(handler)


@pair("E015", "somewhere.else.", "name=")
def a_message_outside_every_app(right: bool) -> None:
    class Stray(Event, name="tests.Stray" if right else None):
        __module__ = OUTSIDE

    handles(Stray)(handler)


@pair("E015", "somewhere.else.", "name=")
def a_handler_outside_every_app(right: bool) -> None:
    def stray(message: Any, context: Any) -> None: ...

    stray.__module__ = OUTSIDE
    handles(Opened, name="tests.stray" if right else None)(stray)


@pair("E021", "tests.test_checks.handler", "shorter")
def a_handlers_name_that_does_not_fit(right: bool) -> None:
    handles(Opened, name="n" * (200 if right else 201))(handler)


@pair("E021", "Endless", "shorter")
def a_messages_alias_that_does_not_fit(right: bool) -> None:
    class Endless(Event, aliases=["n" * (200 if right else 201)]):
        pass

    handles(Endless)(handler)


# Who reacts to what


@pair("E003", "TallyState", "one workflow")
def one_state_in_two_workflows(right: bool) -> None:
    started(TallyState)
    started(keyed() if right else TallyState)


@pair("E004", "Unstarted", "@started_by")
def a_workflow_that_nothing_starts(right: bool) -> None:
    class Unstarted(Workflow[TallyState]):
        @(started_by if right else when)(Opened)
        def note(self, message: Opened) -> None: ...


@pair("E005", "first, second", "one step")
def two_steps_of_one_kind_for_one_message(right: bool) -> None:
    class Twice(Workflow[TallyState]):
        @started_by(Opened)
        def first(self, message: Opened) -> None: ...

        @(when if right else started_by)(Opened)
        def second(self, message: Opened) -> None: ...


@pair("E012", "tests.test_checks.Remind", "one handler")
def a_command_with_two_handlers(right: bool) -> None:
    handles(Remind, name="tests.one")(handler)
    handles(Opened if right else Remind, name="tests.two")(handler)


@pair("E012", "TallyState", "one handler")
def a_command_with_a_handler_and_a_workflow(right: bool) -> None:
    started(TallyState).when(Remind)(step)
    handles(Opened if right else Remind)(handler)


# Functions


@pair("E018", "Later.note", "async_to_sync")
def an_async_step(right: bool) -> None:
    if right:

        class Later(Workflow[TallyState]):
            @started_by(Opened)
            def note(self, message: Opened) -> None: ...

    else:

        class Later(Workflow[TallyState]):  # type: ignore[no-redef]
            @started_by(Opened)
            async def note(self, message: Opened) -> None: ...


@pair("E018", "later", "async_to_sync")
def an_async_handler(right: bool) -> None:
    async def later(message: Any, context: Any) -> None: ...

    handles(Opened)(handler if right else later)


@pair("E018", "piecemeal", "def piecemeal(message, context)")
def a_handler_that_yields(right: bool) -> None:
    def piecemeal(message: Any, context: Any) -> Iterator[None]:
        yield

    handles(Opened)(handler if right else piecemeal)


@pair("E019", "tests.test_checks.handler", "extends Command or Event")
def a_handler_of_what_is_no_message(right: bool) -> None:
    handles(Opened if right else dict)(handler)  # type: ignore[type-var]


@pair("E019", "tests.test_checks.handler", "extends Command or Event")
def a_handler_of_a_base_class(right: bool) -> None:
    handles(Opened if right else Event)(handler)


@pair("E019", "tests.test_checks.step", "extends Command or Event")
def a_step_for_a_message_by_its_name(right: bool) -> None:
    started(TallyState).when(Noted if right else "Noted", lookup="key", maps_to="key")(step)


@pair("E026", "Forgetful", "class Forgetful(Workflow[YourState])")
def a_workflow_that_names_no_state(right: bool) -> None:
    base: Any = Workflow[TallyState] if right else Workflow

    class Forgetful(base):  # type: ignore[misc]
        @started_by(Opened)
        def note(self, message: Opened) -> None: ...


@pair("E026", "Base", "in a subclass")
def a_base_whose_subclass_names_no_state(right: bool) -> None:
    class Base(Workflow):  # type: ignore[type-arg]
        @started_by(Opened)
        def note(self, message: Opened) -> None: ...

    if right:

        class Tallies(Base, Workflow[TallyState]):
            pass


@pair("E020", "short", "def short(message, context)")
def a_handler_that_takes_no_context(right: bool) -> None:
    def short(message: Any) -> None: ...

    handles(Opened)(handler if right else short)


@pair("E020", "short", "def short(message, state, context)")
def a_step_that_takes_no_context(right: bool) -> None:
    def short(message: Any, state: Any) -> None: ...

    define_workflow(TallyState).started_by(Opened)(step if right else short)


@pair("E020", "Misses.note", "def note(self, message)")
def a_method_that_takes_no_message(right: bool) -> None:
    def note(self: Any) -> None: ...

    class Misses(Workflow[TallyState]):
        locals()["note"] = started_by(Opened)(ignore if right else note)


@pair("E022", "tests.test_checks.step", "retry")
def an_unknown_if_missing(right: bool) -> None:
    started(TallyState).when(Noted, if_missing="retry" if right else "retyr")(step)


@pair("E023", "tests.test_checks.handler", "exception classes")
def an_unrecoverable_that_is_no_exception(right: bool) -> None:
    handles(Opened, unrecoverable=[ValueError if right else "ValueError"])(handler)  # type: ignore[list-item]


# Lookups


@pair("E006", "TallyState", "key")
def a_maps_to_that_is_no_field(right: bool) -> None:
    started(TallyState).when(Noted, lookup="key", maps_to="key" if right else "kye")(step)


@pair("E006", "TallyState", "key")
def a_once_per_that_is_no_field(right: bool) -> None:
    define_workflow(TallyState).started_by(
        Opened, lookup="key", once_per="key" if right else "kye"
    )(step)


@pair("E007", "tests.test_checks.Noted", "Did you mean key?")
def a_lookup_that_is_no_field_of_the_message(right: bool) -> None:
    started(TallyState).when(Noted, lookup="key" if right else "kye", maps_to="key")(step)


@pair("E007", "tests.test_checks.Elsewhere", "lookup=")
def a_once_per_that_the_message_lacks(right: bool) -> None:
    define_workflow(TallyState).started_by(
        Elsewhere, once_per="key", lookup="code" if right else None
    )(step)


class Elsewhere(Event):
    code: str


@pair("E008", "tests.test_checks.step", "maps_to=")
def a_lookup_by_function_without_maps_to(right: bool) -> None:
    started(TallyState).when(Noted, lookup=lambda m: m.key, maps_to="key" if right else None)(step)


@pair("E008", "tests.test_checks.step", "maps_to=")
def a_lookup_by_attribute_without_maps_to(right: bool) -> None:
    started(TallyState).when(Noted, lookup=attribute("key"), maps_to="key" if right else None)(step)


@pair("E008", "tests.test_checks.step", "once_per=")
def a_start_with_a_lookup_without_once_per(right: bool) -> None:
    define_workflow(TallyState).started_by(Opened, lookup="key", once_per="key" if right else None)(
        step
    )


@pair("E009", "tests.test_checks.step", "lookup=")
def a_maps_to_without_a_lookup(right: bool) -> None:
    started(TallyState).when(Noted, maps_to="key", lookup="key" if right else None)(step)


@pair("E010", "KeyedState.key", "db_index=True")
def a_lookup_without_an_index(right: bool) -> None:
    started(keyed(db_index=right)).when(Noted, lookup="key")(step)


@pair("E010", "KeyedState.key", "begins with it")
def a_lookup_by_the_second_column_of_an_index(right: bool) -> None:
    fields = ["key", "other"] if right else ["other", "key"]
    indexes = (models.Index(fields=fields, name="tests_keyed"),)
    started(keyed_with(indexes=indexes)).when(Noted, lookup="key")(step)


@pair("E010", "KeyedState.key", "db_index=True")
def a_lookup_by_an_index_of_few_rows(right: bool) -> None:
    condition = Q(ended_at__isnull=True) if right else Q(other="special")
    indexes = (models.Index(fields=["key"], condition=condition, name="tests_keyed"),)
    started(keyed_with(indexes=indexes)).when(Noted, lookup="key")(step)


@pair("E010", "KeyedState.key", "db_index=True")
def a_lookup_by_an_index_of_another_kind(right: bool) -> None:
    kind = models.Index if right else GinIndex
    indexes = (kind(fields=["key"], name="tests_keyed"),)
    started(keyed_with(indexes=indexes)).when(Noted, lookup="key")(step)


@pair("E010", "LinkedState.parent", "db_index=True")
def a_lookup_by_a_foreign_key_without_an_index(right: bool) -> None:
    class Parent(models.Model):
        class Meta:
            app_label = "tests"

        def __str__(self) -> str:
            return "parent"

    class LinkedState(WorkflowState):
        parent = models.ForeignKey(Parent, models.CASCADE, db_index=right)

    started(LinkedState).when(Opened, lookup="number", maps_to="parent")(step)


def typed(field: Any, lookup: str) -> None:
    class TypedState(WorkflowState):
        value = field

    started(TypedState).when(Opened, lookup=lookup, maps_to="value")(step)


@pair("E011", "Opened.day", "type")
def a_date_looked_up_in_a_uuid(right: bool) -> None:
    typed(models.UUIDField(db_index=True), "id" if right else "day")


@pair("E011", "Opened.number", "type")
def an_int_looked_up_in_a_date(right: bool) -> None:
    typed(models.DateField(db_index=True), "day" if right else "number")


@pair("E011", "Opened.tags", "type")
def a_list_looked_up_in_an_integer(right: bool) -> None:
    typed(models.IntegerField(db_index=True), "number" if right else "tags")


@pair("E011", "Opened.amount", "type")
def an_optional_decimal_looked_up_in_a_date(right: bool) -> None:
    typed(models.DateTimeField(db_index=True), "day" if right else "amount")


@pair("E011", "Opened.day", "type")
def a_date_for_once_per_in_an_integer(right: bool) -> None:
    class NumberState(WorkflowState):
        number = models.IntegerField(unique=True)

    define_workflow(NumberState).started_by(
        Opened, once_per="number", lookup="number" if right else "day"
    )(step)


@pair("E014", "KeyedState.key", "unique=True")
def once_per_without_a_unique_field(right: bool) -> None:
    define_workflow(keyed(unique=right)).started_by(Opened, once_per="key")(step)


def once_per_with(**constraint: Any) -> None:
    constraints = (models.UniqueConstraint(name="tests_keyed", **constraint),)
    define_workflow(keyed_with(constraints=constraints)).started_by(Opened, once_per="key")(step)


@pair("E014", "KeyedState.key", "that field alone")
def once_per_with_a_constraint_of_two_fields(right: bool) -> None:
    once_per_with(fields=["key"] if right else ["key", "other"])


@pair("E014", "KeyedState.key", "not deferred")
def once_per_with_a_deferred_constraint(right: bool) -> None:
    once_per_with(fields=["key"], deferrable=None if right else Deferrable.DEFERRED)


@pair("E014", "KeyedState.key", "Q(ended_at__isnull=True)")
def once_per_with_a_constraint_of_few_rows(right: bool) -> None:
    once_per_with(
        fields=["key"], condition=Q(ended_at__isnull=True) if right else Q(other="special")
    )


# States


@pair("E013", "VersionedState", "another name")
def a_state_that_declares_a_field_of_the_engine(right: bool) -> None:
    if right:

        class VersionedState(WorkflowState):
            revision = models.CharField(max_length=9)

    else:

        class VersionedState(WorkflowState):  # type: ignore[no-redef]
            version = models.CharField(max_length=9)

    started(VersionedState)


@pair("E013", "EndlessState", "another name")
def a_state_that_drops_a_field_of_the_engine(right: bool) -> None:
    class EndlessState(WorkflowState):
        if not right:
            ended_at = None  # type: ignore[assignment]

    started(EndlessState)


@pair("E013", "'is_live'", "another name")
def a_state_whose_field_hides_a_name_of_the_base(right: bool) -> None:
    class LiveState(WorkflowState):
        if not right:
            is_live = models.BooleanField(default=True)  # type: ignore[assignment]

    started(LiveState)


@pair("E016", "proxy", "extend WorkflowState")
def a_proxy_state(right: bool) -> None:
    class ProxyState(TallyState):
        class Meta:
            proxy = True

    started(TallyState if right else ProxyState)


@pair("E016", "multi-table", "extend WorkflowState")
def a_multi_table_state(right: bool) -> None:
    class ChildState(TallyState):
        more = models.IntegerField(default=0)

    started(TallyState if right else ChildState)


@pair("E016", "abstract", "concrete")
def an_abstract_state(right: bool) -> None:
    class BareState(WorkflowState):
        class Meta:
            abstract = not right

    started(BareState)


@pair("E017", "ManagedState", "WorkflowStateQuerySet")
def a_default_manager_of_another_queryset(right: bool) -> None:
    class OwnQuerySet(WorkflowStateQuerySet):
        pass

    class ManagedState(WorkflowState):
        objects = OwnQuerySet.as_manager() if right else models.Manager()

    started(ManagedState)


@pair("E024", "SecretState", "Did you mean iban?")
def a_sensitive_field_that_is_misspelt(right: bool) -> None:
    class SecretState(WorkflowState):
        sensitive_fields = ("iban" if right else "ibn",)
        iban = models.CharField(max_length=50)

    started(SecretState)


@pair("E024", "no list", "sensitive_fields = ('iban',)")
def a_sensitive_field_alone(right: bool) -> None:
    class SecretState(WorkflowState):
        sensitive_fields = ("iban",) if right else "iban"
        iban = models.CharField(max_length=50)

    started(SecretState)


@pair("E025", "KeptState", "timedelta")
def a_retention_that_is_no_time(right: bool) -> None:
    class KeptState(WorkflowState):
        workflow_retention = timedelta(days=30) if right else 30

    started(KeptState)


@pair("W001", "SavedState", "pre_save")
def a_state_that_overrides_save(right: bool) -> None:
    class SavedState(WorkflowState):
        if not right:

            def save(self, **options: Any) -> None:
                super().save(**options)

    started(SavedState)


@pair("W002", "HeardState", "sender=HeardState")
def a_state_with_a_receiver_of_post_save(right: bool) -> None:
    class HeardState(WorkflowState):
        pass

    if not right:
        post_save.connect(ignore, sender=HeardState)
        HEARD.append(HeardState)
    started(HeardState)


HEARD: list[type[WorkflowState]] = []


@pytest.fixture(autouse=True)
def _receivers_are_disconnected() -> Iterator[None]:
    """Django knows a sender by its id, which another class may get later."""
    yield
    while HEARD:
        post_save.disconnect(ignore, sender=HEARD.pop())


def reports(declare: Callable[[], Any]) -> list[CheckMessage]:
    """What `check` says of these declarations alone."""
    with isolate_apps("tests"), isolated_registry():
        declare()
        return reports_now()


def reports_now() -> list[CheckMessage]:
    """What our checks say, without those that `check --database` adds."""
    ours = [check for check in checks_registry.get_checks() if TAG in check.tags]
    return [report for check in ours for report in check(app_configs=None, databases=None)]


@pytest.mark.parametrize("case", PAIRS)
def test_a_wrong_declaration_is_found_with_its_class_and_the_remedy(case: Pair) -> None:
    found = reports(lambda: case.declare(False))

    assert [report.id for report in found] == [f"django_workflows.{case.id}"]
    assert case.names in found[0].msg
    assert case.remedy in found[0].hint
    assert isinstance(found[0], Error) == case.id.startswith("E")


@pytest.mark.parametrize("case", PAIRS)
def test_its_correct_twin_raises_nothing(case: Pair) -> None:
    found = reports(lambda: case.declare(True))

    assert found == []


def subclassed(**options: Any) -> None:
    class Tallies(Workflow[TallyState], **options):
        pass


def bare(decorator: Any) -> Callable[[], Any]:
    return lambda: decorator(ignore)


SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("wrong", "sentence", "right"),
    [
        (
            lambda: started_by(Opened, onceper="key"),  # type: ignore[call-arg]
            "@started_by has no option 'onceper'. Did you mean once_per?",
            lambda: started_by(Opened, once_per="key"),
        ),
        (
            lambda: handles(Opened, atempts=3),  # type: ignore[call-arg]
            "@handles has no option 'atempts'. Did you mean attempts?",
            lambda: handles(Opened, attempts=3),
        ),
        (
            lambda: handles(Opened, atomik=False),  # type: ignore[call-arg]
            "@handles has no option 'atomik'. Did you mean atomic?",
            lambda: handles(Opened, atomic=False),
        ),
        (
            lambda: when(Opened, if_mising="fail"),  # type: ignore[call-arg]
            "@when has no option 'if_mising'. Did you mean if_missing?",
            lambda: when(Opened, if_missing="fail"),
        ),
        (
            lambda: when_all(Opened, Noted, cuont=3),  # type: ignore[call-arg]
            "@when_all has no option 'cuont'. Did you mean count?",
            lambda: when_all(Opened, Noted, count=3),
        ),
        (
            lambda: on_failure(Remind, zzz=3),  # type: ignore[call-arg]
            "There are: attempts, backoff, unrecoverable.",
            lambda: on_failure(Remind),
        ),
        (
            lambda: subclassed(atempts=3),
            "class Tallies has no option 'atempts'. Did you mean attempts?",
            lambda: subclassed(attempts=3),
        ),
        (
            lambda: define_workflow(TallyState, que="slow"),  # type: ignore[call-arg]
            "define_workflow() has no option 'que'. Did you mean queue?",
            lambda: define_workflow(TallyState, queue="slow"),
        ),
        *(
            (
                lambda attempts=attempts: handles(Opened, attempts=attempts),
                f"@handles has attempts={attempts!r}. Write a whole number of at least 1",
                lambda: handles(Opened, attempts=1),
            )
            for attempts in ("3", 0, -1, True, 2.5)
        ),
        *(
            (
                lambda backoff=backoff: subclassed(backoff=backoff),
                f"class Tallies has backoff={backoff!r}. Write a timedelta from 0",
                lambda: subclassed(backoff=timedelta(0)),
            )
            for backoff in (3, "3", -SECOND)
        ),
        (
            lambda: handles(Opened, unrecoverable=ValueError),  # type: ignore[arg-type]
            "Write unrecoverable=[ValueError].",
            lambda: handles(Opened, unrecoverable=[ValueError]),
        ),
        (bare(handles), "Write @handles(Message).", lambda: handles(Opened)),
        (bare(started_by), "Write @started_by(Message).", lambda: started_by(Opened)),
        (bare(when), "@when on ignore names no message.", lambda: when(Opened)),
        (bare(when_all), "Write @when_all(Message).", lambda: when_all(Opened)),
        (bare(on_failure), "Write @on_failure(Message).", lambda: on_failure(Remind)),
    ],
)
def test_an_option_that_cannot_work_is_an_error_where_it_is_declared(
    wrong: Callable[[], Any], sentence: str, right: Callable[[], Any]
) -> None:
    with isolated_registry(), pytest.raises(DeclarationError) as raised:
        wrong()
    with isolated_registry():
        right()

    assert sentence in str(raised.value)


def test_a_lookup_of_unknown_type_is_not_judged() -> None:
    class Loose(Event):
        value: Any

    class DatedState(WorkflowState):
        value = models.DateField(db_index=True)

    def declare() -> None:
        workflow = define_workflow(DatedState)
        workflow.started_by(Opened)(step)
        workflow.when(Loose, lookup="value")(step)

    with isolate_apps("tests"):
        found = reports(declare)

    assert found == []


def test_a_wrong_declaration_names_where_it_stands() -> None:
    found = reports(lambda: define_workflow(TallyState))

    assert str(found[0]).startswith("define_workflow(tests.models.TallyState): ")


# Settings

LEASE, MINUTE = timedelta(seconds=30), timedelta(minutes=1)


@pytest.mark.parametrize(
    ("id", "wrong", "names", "remedy", "right"),
    [
        ("E101", {"ATTEMPS": 3}, "'ATTEMPS'", "Did you mean ATTEMPTS?", {"ATTEMPTS": 3}),
        ("E101", {"lease": LEASE}, "'lease'", "Did you mean LEASE?", {"LEASE": LEASE}),
        ("E101", {"zzz": 1}, "'zzz'", "There are: ATTEMPTS", {}),
        ("E102", {"LEASE": 30}, "'LEASE'", "timedelta", {"LEASE": LEASE}),
        ("E102", {"ATTEMPTS": "3"}, "'ATTEMPTS'", "int", {"ATTEMPTS": 3}),
        ("E102", {"ATTEMPTS": True}, "'ATTEMPTS'", "int", {"ATTEMPTS": 1}),
        ("E102", {"BACKOFF_FACTOR": "4"}, "'BACKOFF_FACTOR'", "float", {"BACKOFF_FACTOR": 4}),
        ("E102", {"QUEUE": 5}, "'QUEUE'", "str", {"QUEUE": "five"}),
        ("E102", {"RECOVERY": 5}, "'RECOVERY'] is 5", "dotted path", {"RECOVERY": ignore}),
        (
            "E102",
            {"RECOVERY": "tests.test_checks.ignroe"},
            "'tests.test_checks.ignroe'",
            "dotted path",
            {"RECOVERY": "tests.test_checks.ignore"},
        ),
        (
            "E102",
            {"RECOVERY": "orders.recoveri.policy"},
            "cannot be imported",
            "dotted path",
            {"RECOVERY": None},
        ),
        ("E102", {"RECOVERY": "tests.test_checks.OUTSIDE"}, "neither", "dotted path", {}),
        ("E102", ["ATTEMPTS"], "no dict", "dict", {}),
        ("E102", None, "no dict", "dict", {}),
        ("E103", {"LEASE": timedelta(0)}, "'LEASE'", "more than zero", {"LEASE": LEASE}),
        ("E103", {"ATTEMPTS": 0}, "'ATTEMPTS'", "more than zero", {"ATTEMPTS": 1}),
        ("E103", {"UNKNOWN_LIMIT": -MINUTE}, "'UNKNOWN_LIMIT'", "zero or more", {}),
        (
            "E103",
            {"RUN_LIMIT": LEASE / 2},
            "'RUN_LIMIT'",
            "Lower LEASE",
            {"RUN_LIMIT": LEASE / 2, "LEASE": LEASE / 2},
        ),
        ("E103", {"RELAY_EVERY": MINUTE}, "'RELAY_EVERY'", "raise LEASE", {"RELAY_EVERY": LEASE}),
        ("E103", {"BACKOFF_MAX": timedelta(0)}, "'BACKOFF_MAX'", "raise", {"BACKOFF_MAX": MINUTE}),
        ("E103", {"QUEUE": "my queue"}, "'my queue'", "letter", {"QUEUE": "my-queue"}),
    ],
)
def test_a_wrong_value_in_the_settings_is_found(
    id: str, wrong: Any, names: str, remedy: str, right: Any
) -> None:
    with override_settings(DJANGO_WORKFLOWS=wrong):
        found = reports(ignore)
    with override_settings(DJANGO_WORKFLOWS=right):
        found_in_twin = reports(ignore)

    assert [report.id for report in found] == [f"django_workflows.{id}"]
    assert names in found[0].msg
    assert remedy in found[0].hint
    assert found_in_twin == []


def test_without_django_dramatiq_there_are_no_workers() -> None:
    with modify_settings(INSTALLED_APPS={"remove": "django_dramatiq"}):
        found = reports(ignore)

    assert [report.id for report in found] == ["django_workflows.E104"]
    assert "INSTALLED_APPS" in found[0].hint


def test_dramatiq_broker_must_be_set() -> None:
    with override_settings():
        del django_settings.DRAMATIQ_BROKER
        found = reports(ignore)

    assert [report.id for report in found] == ["django_workflows.E105"]
    assert "dramatiq_settings('db://')" in found[0].hint


@pytest.mark.django_db
def test_time_zones_must_be_used() -> None:
    with override_settings(USE_TZ=False):
        found = reports(ignore)

    assert [report.id for report in found] == ["django_workflows.E106"]
    assert "USE_TZ = True" in found[0].hint


def test_the_settings_of_the_test_project_raise_nothing() -> None:
    assert reports_now() == []


# Databases

SQLITE = "django.db.backends.sqlite3"
POSTGRES = "django.db.backends.postgresql"


@contextmanager
def database(engine: str, **options: Any) -> Iterator[None]:
    """Another database in the place of the default one; nothing connects to it."""
    before = connections["default"]
    given = {"default": {"ENGINE": engine, "NAME": "unused", "OPTIONS": options}}
    connections["default"] = ConnectionHandler(given)["default"]
    try:
        yield
    finally:
        connections["default"] = before


@pytest.mark.parametrize(
    ("id", "wrong", "names", "remedy", "right"),
    [
        (
            "E111",
            database("django.db.backends.dummy"),
            "'default'",
            "PostgreSQL or SQLite",
            database(POSTGRES),
        ),
        (
            "E113",
            database(SQLITE),
            "'default'",
            "'IMMEDIATE'",
            database(SQLITE, transaction_mode="IMMEDIATE"),
        ),
        (
            "E113",
            database(SQLITE, transaction_mode="DEFERRED"),
            "'DEFERRED'",
            "'IMMEDIATE'",
            database(SQLITE, transaction_mode="immediate"),
        ),
        (
            "E114",
            database(POSTGRES, isolation_level=4),
            "SERIALIZABLE",
            "isolation_level",
            database(POSTGRES, isolation_level=2),
        ),
        (
            "E114",
            database(POSTGRES, options="-c default_transaction_isolation=serializable"),
            "serializable",
            "'options'",
            database(POSTGRES, options="-c default_transaction_isolation=read\\ committed"),
        ),
    ],
)
def test_a_wrong_database_is_found(
    id: str, wrong: Any, names: str, remedy: str, right: Any
) -> None:
    with wrong:
        found = reports(ignore)
    with right:
        found_in_twin = reports(ignore)

    assert [report.id for report in found] == [f"django_workflows.{id}"]
    assert names in found[0].msg
    assert remedy in found[0].hint
    assert found_in_twin == []


class Router:
    def db_for_write(self, model: type[models.Model], **_hints: Any) -> str | None:
        return "other" if issubclass(model, WorkflowState) else None


def test_a_state_in_another_database_is_found() -> None:
    with override_settings(DATABASE_ROUTERS=[Router()]):
        found = reports(lambda: started(TallyState))

    assert [report.id for report in found] == ["django_workflows.E115"]
    assert "tests.models.TallyState" in found[0].msg
    assert "TallyState and django_workflows.Delivery" in found[0].hint


def test_an_isolation_level_is_named() -> None:
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    with database(POSTGRES, isolation_level=IsolationLevel.REPEATABLE_READ):
        found = reports(ignore)

    assert "REPEATABLE_READ" in found[0].msg


def test_an_old_sqlite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "OLDEST_SQLITE", (99, 0))

    with database(SQLITE, transaction_mode="IMMEDIATE"):
        found = reports(ignore)

    assert [report.id for report in found] == ["django_workflows.E112"]
    assert "newer SQLite" in found[0].hint


@pytest.mark.postgres
@pytest.mark.django_db
def test_the_isolation_level_of_the_server_is_found() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_isolation = 'repeatable read'")

    found = check_connection(databases=["default"])

    assert [report.id for report in found] == ["django_workflows.E114"]
    assert "repeatable read" in found[0].msg
    assert "ALTER ROLE" in found[0].hint


@pytest.mark.postgres
@pytest.mark.django_db
@pytest.mark.parametrize("name", ["lock_timeout", "idle_in_transaction_session_timeout"])
def test_waits_without_a_limit_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {})
    with connection.cursor() as cursor:
        cursor.execute(f"SET {name} = 0")

    found = check_connection(databases=["default"])

    assert [report.id for report in found] == ["django_workflows.W111"]
    assert name in found[0].msg
    assert f"-c {name}=" in found[0].hint


@pytest.mark.postgres
@pytest.mark.django_db
def test_limits_that_the_role_sets_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {})
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '5s'")
        cursor.execute("SET idle_in_transaction_session_timeout = '60s'")

    found = check_connection(databases=["default"])

    assert found == []


@pytest.mark.django_db
def test_the_test_projects_database_raises_nothing() -> None:
    assert check_connection(databases=["default"]) == []


def test_the_database_is_not_asked_without_being_named() -> None:
    with database(POSTGRES):  # which nobody could connect to
        found = check_connection(databases=None)

    assert found == []


# Brokers


def built(url: str, **options: Any) -> Any:
    made = dramatiq_settings(url)
    return import_string(made["BROKER"])(middleware=[], **{**made["OPTIONS"], **options})


@pytest.mark.parametrize(
    ("id", "make", "names", "remedy"),
    [
        (
            "W121",
            lambda: built("amqp://localhost", confirm_delivery=False),
            "confirm_delivery",
            "'confirm_delivery': True",
        ),
        ("W122", lambda: built("amqp://localhost?heartbeat=0"), "heartbeat", "heartbeat=60"),
        (
            "W123",
            lambda: RabbitmqBroker(
                host="localhost", heartbeat=60, confirm_delivery=True, middleware=[]
            ),
            "blocked_connection_timeout",
            "blocked_connection_timeout=2",
        ),
        (
            "W124",
            lambda: built("redis://localhost", maintenance_chance=1000),
            "maintenance_chance",
            "50_000",
        ),
        (
            "W125",
            lambda: RedisBroker(
                host="localhost", socket_timeout=None, maintenance_chance=50_000, middleware=[]
            ),
            "socket_timeout",
            "socket_timeout=5",
        ),
        (
            "W126",
            lambda: with_middleware("django_dramatiq.middleware.AdminMiddleware"),
            "AdminMiddleware",
            "Remove",
        ),
        (
            "W127",
            lambda: with_middleware("dramatiq.middleware.AgeLimit", max_age=1000),
            "AgeLimit",
            "max_age",
        ),
    ],
)
def test_an_unsafe_broker_is_warned_of(
    id: str, make: Callable[[], Any], names: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "transport", DramatiqTransport(make()))

    found = reports(ignore)

    assert [report.id for report in found] == [f"django_workflows.{id}"]
    assert names in found[0].msg
    assert remedy in found[0].hint


def with_middleware(path: str, **options: Any) -> Any:
    broker = built("redis://localhost")
    broker.middleware = [import_string(path)(**options)]
    return broker


@pytest.mark.parametrize("url", ["amqp://localhost", "redis://localhost", "rediss://localhost"])
def test_a_broker_that_was_built_from_its_url_is_safe(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = built(url)
    broker.middleware = [import_string(path)() for path in dramatiq_settings(url)["MIDDLEWARE"]]
    monkeypatch.setattr(outbox, "transport", DramatiqTransport(broker))

    assert reports(ignore) == []


def test_an_age_limit_for_other_actors_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = with_middleware("dramatiq.middleware.AgeLimit")
    monkeypatch.setattr(outbox, "transport", DramatiqTransport(broker))

    assert reports(ignore) == []


# The command


def check(**env: str) -> Any:
    """`manage.py check` on a project with an app full of wrong declarations."""
    env = {"DJANGO_SETTINGS_MODULE": "tests.broken.settings", **env}
    url = "postgres://nobody@127.0.0.1:1/nowhere"
    return run_manage("check", env=environment(url, "db://", env), check=False)


def test_manage_py_check_finds_every_wrong_declaration() -> None:
    done = check()

    assert done.returncode == 1
    for number in (1, 3, 4, 6, 10, 11, 12, 13, 14, 15, 16, 18, 114):
        assert f"django_workflows.E{number:03}" in done.stderr
    assert done.stderr.count("HINT:") == len(
        re.findall(r"\(django_workflows\.[EW]\d+\)", done.stderr)
    )


@pytest.mark.parametrize(
    ("hidden", "sentence"),
    [
        ("step", "The step Hiding.send hides a name of Workflow. Give the step another name."),
        (
            "field",
            "The field 'copy' of Hiding hides a name of its base class. "
            "Give the field another name.",
        ),
    ],
)
def test_manage_py_check_shows_which_name_is_hidden(hidden: str, sentence: str) -> None:
    done = check(HIDDEN=hidden)

    assert done.returncode != 0
    assert sentence in done.stderr


# The documentation


def ids_in_the_code() -> set[str]:
    sources = (ROOT / "django_workflows" / "checks").glob("*.py")
    text = "".join(source.read_text() for source in sources)
    calls = re.findall(r"\b(error|warning)\(\s*(\d+),", text)
    return {f"{'E' if kind == 'error' else 'W'}{int(number):03}" for kind, number in calls}


def test_every_check_is_documented() -> None:
    page = (ROOT / "docs" / "checks.md").read_text()

    documented = re.findall(r"^\| `django_workflows\.([EW]\d{3})` \|", page, re.MULTILINE)

    assert len(documented) == len(set(documented))
    assert set(documented) == ids_in_the_code()


def test_every_check_of_a_declaration_has_a_pair() -> None:
    paired = {case.values[0].id for case in PAIRS}

    assert {id for id in ids_in_the_code() if id[1] == "0"} <= paired
