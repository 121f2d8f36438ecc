"""Log records: which delivery they are about, in the engine's records and in everybody's."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from django_workflows import Command, Event, define_workflow, handles, leases, publish, relay, send
from django_workflows.dispatch import claim, deliver
from django_workflows.logs import FACTS, DeliveryFilter
from django_workflows.models import Delivery, Status
from tests.delivering import deliver_due, delivery_of
from tests.models import ParcelState
from tests.processes import ROOT, run_manage

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

theirs = logging.getLogger("somebody.elses")


class ParcelPosted(Event):
    number: int = 1


class ParcelArrived(Event):
    number: int = 1


class WeighParcel(Command):
    pass


@contextmanager
def filtered() -> Iterator[list[logging.LogRecord]]:
    """The records that reach a handler with our filter, whoever logs them."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    handler.addFilter(DeliveryFilter())
    logging.getLogger().addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger().removeHandler(handler)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name, "absent") for name in FACTS}


def facts(delivery: Delivery, **others: Any) -> dict[str, Any]:
    """What a record about this delivery should say."""
    return {
        "delivery_id": str(delivery.id),
        "delivery_attempt": 1,
        "delivery_handler": delivery.handler,
        "delivery_workflow": "",
        "delivery_instance": None,
        "delivery_message": delivery.message_name,
        "delivery_message_id": str(delivery.message_id),
        "delivery_correlation_id": str(delivery.correlation_id),
        **others,
    }


def record_saying(records: list[logging.LogRecord], text: str) -> logging.LogRecord:
    return next(record for record in records if text in record.getMessage())


def test_the_record_of_a_failure_says_which_attempt_of_which_delivery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        raise ValueError("no scales")

    send(WeighParcel())
    first = delivery_of(WeighParcel)
    Delivery.objects.update(attempts=2)

    deliver(first.id)

    record = record_saying(caplog.records, "Attempt 3")
    assert facts_of(record) == facts(first, delivery_attempt=3)


def test_the_record_of_a_message_that_is_ignored_names_the_workflow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workflow = define_workflow(ParcelState)
    workflow.started_by(ParcelPosted)(lambda message, state, context: None)
    workflow.when(ParcelArrived, lookup="number")(lambda message, state, context: None)
    publish(ParcelArrived(number=7))

    deliver_due()

    record = record_saying(caplog.records, "The message is ignored")
    arrived = delivery_of(ParcelArrived)
    assert facts_of(record) == facts(arrived, delivery_workflow="tests.ParcelState")


def test_the_record_of_a_message_after_the_end_names_the_instance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        state.number = message.number
        context.complete()

    workflow.when(ParcelArrived, lookup="number")(lambda message, state, context: None)
    publish(ParcelPosted())
    deliver_due()
    publish(ParcelArrived())

    with caplog.at_level(logging.INFO):
        deliver_due()

    record = record_saying(caplog.records, "came after its end")
    assert facts_of(record)["delivery_instance"] == str(ParcelState.objects.get().pk)


def test_the_record_of_a_delivery_that_cost_too_many_workers_names_it(
    caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    handles(WeighParcel)(lambda message, context: None)
    settings.DJANGO_WORKFLOWS = {"LOSSES": 1, "LEASE": timedelta(seconds=-1)}
    send(WeighParcel())
    claim(delivery_of(WeighParcel).id)

    relay.take("default", 10)

    record = record_saying(caplog.records, "has failed: Its worker died")
    assert facts_of(record) == facts(delivery_of(WeighParcel, status=Status.FAILED))


def test_the_record_of_a_delivery_that_runs_too_long_names_it(
    caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    handles(WeighParcel)(lambda message, context: None)
    settings.DJANGO_WORKFLOWS = {"RUN_LIMIT": timedelta(seconds=-1)}
    send(WeighParcel())
    claimed = claim(delivery_of(WeighParcel).id)
    assert claimed is not None

    with leases.held(claimed):
        leases.extend()

    record = record_saying(caplog.records, "has run longer")
    assert facts_of(record) == facts(claimed)


def test_a_run_that_lost_its_delivery_is_recorded_with_it(caplog: pytest.LogCaptureFixture) -> None:
    @handles(WeighParcel, atomic=False)
    def weigh(message: WeighParcel, context: Any) -> None:
        Delivery.objects.update(claims=7)

    send(WeighParcel())

    deliver(delivery_of(WeighParcel).id)

    record = record_saying(caplog.records, "another worker has it")
    assert facts_of(record) == facts(delivery_of(WeighParcel))


def test_with_the_filter_their_own_records_say_which_delivery_they_are_about() -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        theirs.warning("The scales are slow.")

    send(WeighParcel())

    with filtered() as records:
        deliver_due()

    record = record_saying(records, "The scales are slow.")
    assert facts_of(record) == facts(delivery_of(WeighParcel))


def test_with_the_filter_records_of_a_step_name_workflow_and_instance() -> None:
    workflow = define_workflow(ParcelState)

    @workflow.started_by(ParcelPosted)
    def post(message: ParcelPosted, state: ParcelState, context: Any) -> None:
        theirs.warning("It was posted.")

    publish(ParcelPosted())

    with filtered() as records:
        deliver_due()

    record = record_saying(records, "It was posted.")
    assert facts_of(record) == facts(
        delivery_of(ParcelPosted),
        delivery_workflow="tests.ParcelState",
        delivery_instance=str(ParcelState.objects.get().pk),
    )


def test_with_the_filter_records_outside_a_handler_have_the_fields_empty() -> None:
    handles(WeighParcel)(lambda message, context: None)
    send(WeighParcel())

    with filtered() as records:
        deliver_due()
        theirs.warning("Nothing is being handled.")

    record = record_saying(records, "Nothing is being handled.")
    assert facts_of(record) == dict.fromkeys(FACTS)


def test_the_filter_leaves_what_a_record_says_itself() -> None:
    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        theirs.warning("About another.", extra={"delivery_id": "another"})

    send(WeighParcel())

    with filtered() as records:
        deliver_due()

    assert facts_of(record_saying(records, "About another."))["delivery_id"] == "another"


def test_no_fact_hides_an_attribute_of_log_records() -> None:
    record = logging.LogRecord("name", logging.INFO, "path", 1, "text", (), None)

    assert not {name for name in FACTS if hasattr(record, name)}


def test_the_json_logging_of_the_docs_works_before_the_apps_are_loaded(tmp_path: Any) -> None:
    settings, formatter = documented()
    (tmp_path / "json_settings.py").write_text(f"from tests.settings import *\n{settings}")
    (tmp_path / "myproject").mkdir()
    (tmp_path / "myproject" / "jsonlogs.py").write_text(formatter)
    (tmp_path / "says_it.py").write_text(SAYS_IT)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "DJANGO_SETTINGS_MODULE": "json_settings"}

    done = run_manage("shell", "-c", "import says_it", env={**os.environ, **env})

    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    said = next(line for line in lines if line["message"] == "Weighing.")
    assert said["level"] == "WARNING"
    assert said["delivery_handler"] == "t.weigh"
    assert said["delivery_attempt"] == 3


SAYS_IT = """
import logging
from django_workflows.context import Effects, HandlerContext, entered
from django_workflows.models import Delivery
from django_workflows.outbox import Origin
with entered(HandlerContext(Delivery(handler="t.weigh", attempts=2), Origin(), Effects())):
    logging.getLogger("somebody.elses").warning("Weighing.")
"""


def documented() -> tuple[str, str]:
    """The settings and the formatter of the how-to's JSON logging."""
    text = (ROOT / "docs" / "how-to" / "observability.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    settings = next(block for block in blocks if "LOGGING =" in block)
    formatter = next(block for block in blocks if "logging.Formatter" in block)
    return settings, formatter
