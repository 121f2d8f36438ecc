"""Observers watch deliveries and change nothing; without one there is nothing to pay."""

from collections.abc import Sequence
from typing import Any

import pytest
from django.db import DatabaseError, connection

from django_workflows import Command, dispatch, handles, observing, send
from django_workflows.endings import Ending
from django_workflows.models import Delivery, Status
from django_workflows.observing import Observer, Watch
from django_workflows.statements import NewDelivery
from tests.delivering import deliver_due, delivery_of, statuses_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class WeighParcel(Command):
    pass


class Broken(Observer):
    """Raises at whatever it is told."""

    def sent(self, deliveries: Sequence[NewDelivery]) -> None:
        raise ZeroDivisionError("sent")

    def started(self, delivery: Delivery) -> Watch:
        raise ZeroDivisionError("started")


class BrokenLater(Observer):
    def started(self, delivery: Delivery) -> Watch:
        return BrokenWatch()


class BrokenWatch(Watch):
    def ended(self, ending: Ending | BaseException) -> None:
        raise ZeroDivisionError("ended")


class Keeping(Observer):
    """Keeps how deliveries have ended."""

    def __init__(self) -> None:
        self.endings: list[Any] = []

    def started(self, delivery: Delivery) -> Watch:
        return KeepingWatch(self.endings)


class KeepingWatch(Watch):
    def __init__(self, endings: list[Any]) -> None:
        self._endings = endings

    def ended(self, ending: Ending | BaseException) -> None:
        self._endings.append(ending)


@pytest.mark.parametrize("broken", [Broken(), BrokenLater()], ids=["at once", "at the end"])
def test_an_observer_that_raises_is_logged_and_changes_nothing(
    broken: Observer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping()
    monkeypatch.setattr(observing, "observers", (broken, keeping))
    handles(WeighParcel)(lambda message, context: None)

    send(WeighParcel())
    deliver_due()

    assert statuses_of(WeighParcel) == ["handled"]
    assert len(keeping.endings) == 1
    assert "An observer of deliveries failed" in caplog.text


def test_an_ending_that_could_not_be_recorded_is_told_as_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeping = Keeping()
    monkeypatch.setattr(observing, "observers", (keeping,))

    @handles(WeighParcel)
    def weigh(message: WeighParcel, context: Any) -> None:
        raise ValueError("no scales")

    send(WeighParcel())

    with connection.execute_wrapper(no_failures):
        dispatch.deliver(delivery_of(WeighParcel).id)

    assert delivery_of(WeighParcel).status == Status.RUNNING  # the relay has it, after the lease
    assert [type(ending) for ending in keeping.endings] == [DatabaseError]


def no_failures(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    if "attempts + 1" in sql:
        raise DatabaseError("the database is away")
    return execute(sql, params, many, context)
