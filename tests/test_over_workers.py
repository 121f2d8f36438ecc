"""Time, children, joins and failures once more, through real worker processes."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection

from django_workflows import publish, send
from django_workflows.models import UNENDED, Delivery, Status
from tests.concurrency import wait_until
from tests.delivering import delivery_of, statuses_of
from tests.models import InvoiceState, Note, ParcelState, TallyState
from tests.patient.declared import (
    Ask,
    Begun,
    Noted,
    ParcelArrived,
    ParcelOverdue,
    ParcelPosted,
    Ring,
    Think,
    declare,
    patient_env,
)
from tests.processes import Workers
from tests.services import wipe_broker

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(180),
]

RELAY_EVERY = timedelta(milliseconds=200)


@pytest.fixture(autouse=True)
def _declared(isolated_registry: object) -> None:
    declare()


def all_has_ended() -> bool:
    return not Delivery.objects.filter(status__in=UNENDED).exists()


def test_a_delayed_message_survives_a_restart_of_everything(
    rundramatiq: Callable[..., Workers], broker_url: str
) -> None:
    """E37: killed workers, a wiped broker; not before its time, and once."""
    workers = rundramatiq(broker_url, env=patient_env(RELAY_EVERY=RELAY_EVERY))
    send(Ring(text="now"))
    send(Ring(text="later"), delay=timedelta(seconds=6))
    wait_until(lambda: Note.objects.filter(text__startswith="now").exists())

    workers.kill()
    if broker_url != "db://":
        wipe_broker(broker_url)
    workers.start()
    wait_until(all_has_ended, timeout=60)

    rang = Note.objects.get(text__startswith="later")
    later = Delivery.objects.get(message_name="patient.Ring", body__contains="later")
    assert later.started_at is not None
    assert later.started_at >= later.due_at
    assert float(rang.text.split()[1]) >= later.due_at.timestamp() - 0.5  # another clock
    assert later.claims == 1


def test_timeouts_and_answers_of_many_instances(rundramatiq: Callable[..., Workers]) -> None:
    """E38, E39 and E41: each instance ends once, by its answer or by its own timeout."""
    rundramatiq(processes=2, threads=2, env=patient_env())
    publish(*(ParcelPosted(number=number) for number in range(20)))
    wait_until(lambda: ParcelState.objects.count() == 20, timeout=30)

    publish(*(ParcelArrived(number=number) for number in range(0, 20, 2)))
    wait_until(all_has_ended, timeout=60)

    seen = dict(ParcelState.objects.values_list("number", "seen"))
    assert [seen[number] for number in range(1, 20, 2)] == [["overdue"]] * 10
    assert all(seen[number] in (["arrived"], ["overdue"]) for number in range(0, 20, 2))
    assert set(statuses_of(ParcelOverdue)) <= {Status.HANDLED, Status.CANCELLED}
    assert not Delivery.objects.filter(status=Status.FAILED).exists()


def test_parents_children_replies_joins_and_failures(
    rundramatiq: Callable[..., Workers], broker_url: str
) -> None:
    """F43, F45, F46, F47, G50 and D31, with two worker processes."""
    parents, children = (4, 6) if connection.vendor == "postgresql" else (2, 3)
    keys = [f"family {number}" for number in range(parents)]
    publish(Noted(key=keys[0]))  # before there is such a parent
    workers_env = patient_env(RELAY_EVERY=RELAY_EVERY)
    rundramatiq(broker_url, processes=2, threads=2, env=workers_env)
    wait_until(lambda: delivery_of(Noted).waits_for)

    publish(*(Begun(key=key, questions=children) for key in keys))
    wait_until(all_has_ended, timeout=90)

    assert dict(TallyState.objects.values_list("key", "seen")) == {
        key: list(range(children)) for key in keys
    }
    for parent in TallyState.objects.all():
        theirs = InvoiceState.objects.filter(starter_id=parent.pk, lifecycle="completed")
        assert theirs.count() == children
        assert {family for _number, family in theirs.values_list("seen", flat=True)} == {parent.key}
    assert sorted(Note.objects.values_list("text", flat=True)) == sorted(
        [f"child of {key} completed" for key in keys for _ in range(children)]
        + [f"{key} told: ValueError: attempt 2" for key in keys]
        + [f"{keys[0]} noted"]
    )
    assert statuses_of(Ask) == statuses_of(Think) == [Status.HANDLED] * parents * children
