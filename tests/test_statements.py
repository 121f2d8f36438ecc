"""What a delivery executes on Postgres, statement by statement, and by which indexes."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_workflows import (
    Command,
    Event,
    HandlerContext,
    WorkflowContext,
    define_workflow,
    handles,
    publish,
    relay,
    send,
)
from django_workflows.dispatch import deliver
from django_workflows.models import Delivery, Lifecycle, Status
from django_workflows.registry import Registry
from tests.delivering import delivery_of
from tests.models import ParcelState

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("parcels"),
]

Step = WorkflowContext[ParcelState]


class ParcelPosted(Event):
    customer: str


class ParcelScanned(Event):
    customer: str


class ParcelHeld(Event):
    customer: str


class ParcelDelivered(Event):
    customer: str


class PrintLabel(Command):
    pass


class LabelPrinted(Event):
    pass


class ParcelLost(Command):
    """A timeout."""


@pytest.fixture
def parcels(own_registry: Registry) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Step) -> None:
        state.customer = message.customer
        context.send(PrintLabel())

    @workflow.when(LabelPrinted)
    def label(message: LabelPrinted, state: ParcelState, context: Step) -> None:
        state.number = 1
        context.send(ParcelLost(), delay=timedelta(days=1))

    @workflow.when(ParcelScanned, lookup="customer")
    def scan(message: ParcelScanned, state: ParcelState, context: Step) -> None:
        pass

    @workflow.when(ParcelHeld, lookup="customer")
    def hold(message: ParcelHeld, state: ParcelState, context: Step) -> None:
        context.cancel(ParcelLost)

    @workflow.when(ParcelDelivered, lookup="customer")
    def end(message: ParcelDelivered, state: ParcelState, context: Step) -> None:
        context.complete()

    @workflow.when(ParcelLost)
    def give_up(message: ParcelLost, state: ParcelState, context: Step) -> None:
        context.complete()

    @handles(PrintLabel, name="tests.print_label")
    def print_label(message: PrintLabel, context: HandlerContext) -> None:
        context.reply(LabelPrinted())


@pytest.fixture
def many_rows(parcels: None) -> None:
    """20,000 instances, each with a delivery that has ended and a timeout that waits.

    The timeouts of the first 500 are due.
    """
    workflow, timeout = ParcelState._meta.label, ParcelLost.stored_name()
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO tests_parcelstate (id, version, lifecycle, starter_workflow, started_at,
                updated_at, customer, number, seen)
            SELECT gen_random_uuid(), 1, 'running', '', now(), now(), 'customer ' || n, n, '[]'
            FROM generate_series(1, 20000) n
            """
        )
        cursor.execute(
            """
            INSERT INTO django_workflows_delivery (id, message_id, message_name, body, attributes,
                sticky_attributes, correlation_id, workflow_ids, handler, part, instance_id,
                sender, sender_instance_id, sender_step, queue, status, trace_context, created_at,
                due_at, relay_at)
            SELECT gen_random_uuid(), gen_random_uuid(), %(timeout)s, '{}', '{}', '{}',
                gen_random_uuid(), jsonb_build_object(%(workflow)s, id), %(workflow)s, '', id,
                %(workflow)s, id, '', 'default', status, '', now(),
                at, CASE status WHEN 'pending' THEN at END
            FROM (SELECT *, now() + (number - 500) * interval '1 minute' AS at
                  FROM tests_parcelstate) AS parcel,
                 (VALUES ('pending'), ('handled')) AS each (status)
            """,
            {"timeout": timeout, "workflow": workflow},
        )
        cursor.execute("ANALYZE tests_parcelstate, django_workflows_delivery")


def executed_for(delivery: Delivery) -> list[str]:
    """The SQL that handling it executes, and where transactions begin and end."""
    with recorded() as statements, CaptureQueriesContext(connection) as log:
        deliver(delivery.id)
    templates = (in_one_line(sql) for sql, _params in statements)
    queries = (query["sql"] for query in log.captured_queries)
    return [sql if sql in ("BEGIN", "COMMIT", "ROLLBACK") else next(templates) for sql in queries]


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """The SQL and parameters of each statement of the block."""
    statements: list[tuple[str, Any]] = []

    def record(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(record):
        yield statements


def in_order(*statements: str) -> list[str]:
    return [in_one_line(sql) for sql in statements]


def in_one_line(sql: str) -> str:
    return " ".join(sql.split())


def plans_of(statements: list[tuple[str, Any]]) -> list[str]:
    """How Postgres would execute each of them now."""
    plans = []
    with connection.cursor() as cursor:
        for sql, params in statements:
            cursor.execute(f"EXPLAIN {sql}", params)
            plans.append("\n".join(line for (line,) in cursor.fetchall()))
    return plans


CLAIM = """
    UPDATE "django_workflows_delivery" SET status = 'running', claims = claims + 1,
    started_at = statement_timestamp(), relay_at = (statement_timestamp() + %(lease)s)
    WHERE id = %(id)s AND status = 'pending' AND due_at <= statement_timestamp()
    RETURNING "id", "message_id", "message_name", "body", "attributes", "sticky_attributes",
    "correlation_id", "causation_id", "workflow_ids", "trace_context", "handler", "part",
    "instance_id", "sender", "sender_instance_id", "sender_step", "queue", "status", "claims",
    "attempts", "losses", "undoes", "waits_for", "due_at", "started_at", "held_up_since",
    set_config('synchronous_commit', 'off', true)
"""
FIND = """
    SELECT "tests_parcelstate"."id", "tests_parcelstate"."version",
    "tests_parcelstate"."lifecycle", "tests_parcelstate"."starter_workflow",
    "tests_parcelstate"."starter_id", "tests_parcelstate"."started_at",
    "tests_parcelstate"."updated_at", "tests_parcelstate"."ended_at",
    "tests_parcelstate"."order_id", "tests_parcelstate"."customer", "tests_parcelstate"."number",
    "tests_parcelstate"."insured", "tests_parcelstate"."posted_on", "tests_parcelstate"."weight",
    "tests_parcelstate"."seen" FROM "tests_parcelstate" WHERE
"""
FIND_BY_ID = FIND + '"tests_parcelstate"."id" = %s'
FIND_BY_CUSTOMER = (
    FIND + '"tests_parcelstate"."customer" = %s AND "tests_parcelstate"."ended_at" IS NULL'
)
START = """
    INSERT INTO "tests_parcelstate" ("id", "version", "lifecycle", "starter_workflow",
    "starter_id", "order_id", "customer", "number", "insured", "posted_on", "weight", "seen",
    "started_at", "updated_at")
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
    statement_timestamp(), statement_timestamp())
"""
SAVE = """
    UPDATE "tests_parcelstate" SET "number" = %s, "version" = "version" + 1,
    "updated_at" = statement_timestamp(), "lifecycle" = %s, "ended_at" = NULL
    WHERE "id" = %s AND "version" = %s
"""
END = """
    UPDATE "tests_parcelstate" SET "version" = "version" + 1,
    "updated_at" = statement_timestamp(), "lifecycle" = %s, "ended_at" = statement_timestamp()
    WHERE "id" = %s AND "version" = %s
"""
CANCEL = """
    UPDATE "django_workflows_delivery" SET status = 'cancelled', reason = %(reason)s,
    relay_at = NULL, ended_at = statement_timestamp()
    WHERE (sender_instance_id = %(instance_id)s AND sender = ANY(%(workflows)s)
    AND handler = ANY(%(workflows)s) AND instance_id = %(instance_id)s
    AND status IN ('pending', 'running') AND NOT (id = ANY(%(kept)s)))
    OR (sender_instance_id = %(instance_id)s AND status = 'noted') RETURNING id
"""
INSERT = """
    INSERT INTO "django_workflows_delivery" (id, message_id, message_name, body, attributes,
    sticky_attributes, correlation_id, causation_id, workflow_ids, trace_context, handler, part,
    instance_id, sender, sender_instance_id, sender_step, queue, created_at, due_at, relay_at)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, {times})
    ON CONFLICT (message_id, handler, part) DO NOTHING
"""
NOW = "statement_timestamp()"
DUE_LATER = f"GREATEST(COALESCE(%s::timestamptz, {NOW}), {NOW} + %s)"
SEND = INSERT.format(times=f"{NOW}, {NOW}, {NOW} + %s")
SEND_LATER = INSERT.format(times=f"{NOW}, {DUE_LATER}, {DUE_LATER}")
FINISH = """
    UPDATE "django_workflows_delivery" SET status = %(status)s, reason = %(reason)s,
    step = %(step)s, instance_id = %(instance_id)s, version = %(version)s, changes = %(changes)s,
    conflicts = conflicts + %(conflicts)s, ended_at = statement_timestamp(), relay_at = NULL,
    held_up_since = NULL
    WHERE id = %(id)s AND status = 'running' AND claims = %(claims)s
"""


def test_a_step_that_starts_claims_inserts_sends_and_finishes() -> None:
    publish(ParcelPosted(customer="ada"))

    executed = executed_for(delivery_of(ParcelPosted))

    assert executed == in_order(CLAIM, "BEGIN", START, SEND, FINISH, "COMMIT")


def test_a_plain_step_claims_finds_saves_sends_and_finishes() -> None:
    publish(ParcelPosted(customer="ada"))
    deliver(delivery_of(ParcelPosted).id)
    deliver(delivery_of(PrintLabel).id)

    executed = executed_for(delivery_of(LabelPrinted))

    assert executed == in_order(CLAIM, "BEGIN", FIND_BY_ID, SAVE, SEND_LATER, FINISH, "COMMIT")


def test_a_plain_handler_claims_sends_and_finishes() -> None:
    publish(ParcelPosted(customer="ada"))
    deliver(delivery_of(ParcelPosted).id)

    executed = executed_for(delivery_of(PrintLabel))

    assert executed == in_order(CLAIM, "BEGIN", SEND, FINISH, "COMMIT")


def test_a_step_that_completes_cancels_what_is_left() -> None:
    publish(ParcelPosted(customer="ada"))
    deliver(delivery_of(ParcelPosted).id)
    publish(ParcelDelivered(customer="ada"))

    executed = executed_for(delivery_of(ParcelDelivered))

    assert executed == in_order(CLAIM, "BEGIN", FIND_BY_CUSTOMER, END, CANCEL, FINISH, "COMMIT")


def test_a_step_that_does_nothing_writes_only_that_it_was_handled() -> None:
    publish(ParcelPosted(customer="ada"))
    deliver(delivery_of(ParcelPosted).id)
    publish(ParcelScanned(customer="ada"))

    executed = executed_for(delivery_of(ParcelScanned))

    assert executed == in_order(CLAIM, "BEGIN", FIND_BY_CUSTOMER, FINISH, "COMMIT")


def test_a_delivery_that_another_worker_has_costs_one_statement() -> None:
    send(PrintLabel())
    Delivery.objects.update(status=Status.RUNNING)

    executed = executed_for(delivery_of(PrintLabel))

    assert executed == in_order(CLAIM)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("grows", [True, False], ids=["relay", "database broker"])
def test_due_rows_are_taken_by_their_index(grows: bool) -> None:
    with recorded() as statements:
        taken = relay.take("default", 100, grows=grows)

    assert len(taken) == 100
    [plan] = plans_of(statements)
    assert "Index Scan using django_workflows_due" in plan
    assert "Seq Scan" not in plan


@pytest.mark.usefixtures("many_rows")
def test_an_idle_look_for_due_rows_uses_their_index() -> None:
    Delivery.objects.filter(status=Status.PENDING).update(relay_at=Now() + timedelta(days=1))

    with recorded() as statements:
        taken = relay.take("default", 100)

    assert taken == []
    [plan] = plans_of(statements)
    assert "Index Scan using django_workflows_due" in plan
    assert "Seq Scan" not in plan


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("message", [ParcelHeld, ParcelDelivered], ids=["cancel", "complete"])
def test_finding_and_cancelling_use_indexes(message: type[Event]) -> None:
    publish(message(customer="customer 77"))
    delivery = delivery_of(message)

    with recorded() as statements:
        deliver(delivery.id)

    assert ParcelState.objects.get(customer="customer 77").version == 2
    _claim, find, _save, cancel, _finish = plans = plans_of(statements)
    assert "tests_parcelstate_customer" in find
    assert "django_workflows_instance" in cancel or "django_workflows_sender" in cancel
    assert not [plan for plan in plans if "Seq Scan" in plan]


@pytest.mark.usefixtures("many_rows")
def test_finding_by_the_workflow_id_uses_the_primary_key() -> None:
    state = ParcelState.objects.get(customer="customer 77")
    timeout = delivery_of(ParcelLost, instance_id=state.pk, status=Status.PENDING)

    with recorded() as statements:
        deliver(timeout.id)

    state.refresh_from_db()
    assert state.lifecycle == Lifecycle.COMPLETED
    _claim, find, *_rest = plans = plans_of(statements)
    assert "Index Scan using tests_parcelstate_pkey" in find
    assert not [plan for plan in plans if "Seq Scan" in plan]
