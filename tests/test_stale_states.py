"""Saving a state outside a step: the check of the version, and what it refuses."""

import threading

import pytest
from django.db import connection, transaction

from django_workflows import Event, Workflow, publish, started_by, when
from django_workflows.errors import StaleState
from tests.concurrency import at_once, wait_until
from tests.delivering import deliver_due, delivery_of
from tests.models import TallyState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class Counted(Event):
    key: str


# A3
def test_of_two_writers_that_read_one_version_the_second_is_refused() -> None:
    TallyState.objects.create(key="k")
    first, second = TallyState.objects.get(), TallyState.objects.get()
    first.total, second.total, second.seen = 1, 2, ["second"]

    first.save()
    with pytest.raises(StaleState, match=r"version 1 was read"):
        second.save()

    assert list(TallyState.objects.values_list("total", "seen", "version")) == [(1, [], 2)]


# A3
def test_a_writer_that_has_read_again_is_refused_again_when_a_third_was_faster() -> None:
    TallyState.objects.create(key="k")
    first, second, third = (TallyState.objects.get() for _ in range(3))
    first.save()
    with pytest.raises(StaleState):
        second.save()
    second.refresh_from_db()
    third.refresh_from_db()
    third.total = 3
    third.save()

    second.total = 2
    with pytest.raises(StaleState):
        second.save()

    assert TallyState.objects.get().total == 3


# A3
def test_a_writer_that_has_read_again_may_save() -> None:
    TallyState.objects.create(key="k")
    first, second = TallyState.objects.get(), TallyState.objects.get()
    first.total = 1
    first.save()
    with pytest.raises(StaleState):
        second.save()

    second.refresh_from_db()
    second.total += 1
    second.save()

    assert TallyState.objects.get().total == 2
    assert second.version == 3


# A3
def test_some_fields_alone_are_saved_with_the_same_check() -> None:
    TallyState.objects.create(key="k")
    first, second = TallyState.objects.get(), TallyState.objects.get()
    first.total = 1
    first.save(update_fields=["total"])

    second.seen = ["second"]
    with pytest.raises(StaleState):
        second.save(update_fields=["seen"])

    assert list(TallyState.objects.values_list("total", "seen", "version")) == [(1, [], 2)]


# A3
def test_an_update_of_many_rows_moves_their_versions_on() -> None:
    TallyState.objects.create(key="k")
    loaded = TallyState.objects.get()

    TallyState.objects.update(total=5)

    with pytest.raises(StaleState):
        loaded.save()
    assert list(TallyState.objects.values_list("total", "version")) == [(5, 2)]


# A3
@pytest.mark.postgres  # on SQLite the second transaction cannot begin before the first has ended
def test_a_writer_that_waits_for_the_row_is_refused_when_the_other_commits() -> None:
    TallyState.objects.create(key="k")
    loaded = TallyState.objects.get()
    is_saved, other_waits = threading.Event(), threading.Event()

    def save_and_commit_late() -> None:
        with transaction.atomic():
            state = TallyState.objects.get()
            state.total = 1
            state.save()
            is_saved.set()
            wait_until(_somebody_waits_for_us)
            other_waits.set()

    def save_meanwhile() -> None:
        assert is_saved.wait(20)
        loaded.total = 2
        loaded.save()

    first, second = at_once(save_and_commit_late, save_meanwhile)

    assert first is None
    assert other_waits.is_set()
    assert isinstance(second, StaleState)
    assert TallyState.objects.get().total == 1


def _somebody_waits_for_us() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM pg_locks ours JOIN pg_locks waiting USING (transactionid) "
            "WHERE ours.pid = pg_backend_pid() AND ours.granted AND NOT waiting.granted"
        )
        return cursor.fetchone() is not None


# A3, with a step as the second writer: it is run again, on what the first has saved
@pytest.mark.postgres
@pytest.mark.parametrize("how", ["save", "update"])
def test_a_step_overtaken_by_a_save_outside_runs_again_on_the_latest_state(how: str) -> None:
    is_in_step, may_go_on = threading.Event(), threading.Event()
    seen_by_step: list[int] = []

    class Tally(Workflow[TallyState]):
        @started_by(Counted, once_per="key")
        def open(self, message: Counted) -> None: ...

        @when(Counted, lookup="key")
        def count(self, message: Counted) -> None:
            seen_by_step.append(self.state.total)
            self.state.total += 1
            is_in_step.set()
            assert may_go_on.wait(20)

    TallyState.objects.create(key="k")
    publish(Counted(key="k"))

    def save_meanwhile() -> None:
        assert is_in_step.wait(20)
        if how == "update":
            TallyState.objects.update(total=40)
        else:
            state = TallyState.objects.get()
            state.total = 40
            state.save()
        may_go_on.set()

    assert at_once(deliver_due, save_meanwhile) == [None, None]

    assert seen_by_step == [0, 40]
    assert TallyState.objects.get().total == 41
    assert delivery_of(Counted).conflicts == 1
