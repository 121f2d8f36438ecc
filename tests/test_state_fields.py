"""Fields of a state: what a step changed is saved, what it did not is not, and it is recorded."""

import copy
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from django.db.models import F
from django.utils import timezone

from django_workflows import Event, WorkflowContext, define_workflow, publish
from django_workflows.models import Delivery, Status, WorkflowState
from tests.delivering import deliver_due
from tests.models import Note, ParcelState, SurveyState, TaggedState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class SurveySent(Event):
    pass


class AnswerGiven(Event):
    pass


def after_a_step(state: WorkflowState, change: Any) -> Delivery:
    """The delivery of a message whose step applied `change` to this instance, read again."""
    workflow = define_workflow(type(state))

    @workflow.when(AnswerGiven, lookup=lambda message: state.pk, maps_to="id")
    def step(message: AnswerGiven, state: Any, context: WorkflowContext[Any]) -> None:
        change(state)

    publish(AnswerGiven())
    deliver_due()
    state.refresh_from_db()
    return Delivery.objects.get()


def after_a_start(model: type[WorkflowState], change: Any) -> Any:
    """The instance that a step started and applied `change` to, read from the database."""
    workflow = define_workflow(model)

    @workflow.started_by(SurveySent)
    def start(message: SurveySent, state: Any, context: WorkflowContext[Any]) -> None:
        change(state)

    publish(SurveySent())
    deliver_due()
    return model._default_manager.get()


WHEN = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("asked_at", WHEN),
        ("asked_at", datetime(2026, 3, 1, tzinfo=UTC)),
        ("reward", Decimal("12.50")),
        ("reward", Decimal("-0.01")),
        ("answers", {"a": [1, {"b": None}], "ü": True}),
        ("answers", ["a list"]),
        ("answers", {}),
        ("rounds", 3),
        ("rounds", 0),
    ],
)
@pytest.mark.parametrize("starts", [True, False])
def test_a_value_that_a_step_assigns_is_read_back_as_it_was(
    field: str, value: Any, starts: bool
) -> None:
    def change(state: SurveyState) -> None:
        setattr(state, field, value)

    if starts:
        state = after_a_start(SurveyState, change)
    else:
        state = SurveyState.objects.create(answers={"before": 1}, rounds=99)
        after_a_step(state, change)

    assert getattr(state, field) == value
    assert type(getattr(state, field)) is type(value)


@pytest.mark.parametrize("how", ["note", "note_id"])
def test_a_foreign_key_is_saved_however_it_is_assigned(how: str) -> None:
    note = Note.objects.create(text="a note")
    state = SurveyState.objects.create()

    delivery = after_a_step(state, lambda s: setattr(s, how, note if how == "note" else note.pk))

    assert state.note == note
    assert delivery.changes == {"note": [None, note.pk]}


def test_a_foreign_key_to_nothing_is_a_failure() -> None:
    state = SurveyState.objects.create()

    delivery = after_a_step(state, lambda s: setattr(s, "note_id", 4711))

    assert (delivery.status, state.note_id, state.version) == (Status.PENDING, None, 1)
    assert "IntegrityError" in delivery.error


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ({"a": [1]}, lambda answers: answers["a"].append(2), {"a": [1, 2]}),
        ({"a": {"b": 1}}, lambda answers: answers["a"].update(b=2), {"a": {"b": 2}}),
        ({"a": 1}, lambda answers: answers.clear(), {}),
        ({"a": 1}, lambda answers: answers.update(a=True), {"a": True}),
        ({"a": [0]}, lambda answers: answers.update(a=[False]), {"a": [False]}),
        ({"a": 1}, lambda answers: answers.update(a=1.0), {"a": 1.0}),
    ],
)
def test_a_change_inside_a_json_field_counts(before: Any, change: Any, after: Any) -> None:
    state = SurveyState.objects.create(answers=copy.deepcopy(before))

    delivery = after_a_step(state, lambda s: change(s.answers))

    assert json.dumps(state.answers) == json.dumps(after)  # True and 1 are equal to Python
    assert json.dumps(delivery.changes) == json.dumps({"answers": [before, after]})
    assert state.version == 2


@pytest.mark.parametrize(
    "touch",
    [
        lambda s: None,
        lambda s: setattr(s, "answers", {"a": [1]}),
        lambda s: s.answers["a"].append(s.answers["a"].pop()),
        lambda s: setattr(s, "reward", Decimal("1.50")),
        lambda s: setattr(s, "asked_at", WHEN.astimezone(timezone.get_fixed_timezone(60))),
    ],
)
def test_a_step_that_changes_nothing_writes_nothing(touch: Any) -> None:
    state = SurveyState.objects.create(answers={"a": [1]}, reward="1.50", asked_at=WHEN)
    before = SurveyState.objects.values().get()

    delivery = after_a_step(state, touch)

    assert (delivery.status, delivery.changes) == (Status.HANDLED, None)
    assert SurveyState.objects.values().get() == before


def test_a_step_writes_the_changed_fields_alone() -> None:
    """What another writer changed by going past the engine stays as it is."""
    state = SurveyState.objects.create()

    def change(loaded: SurveyState) -> None:
        SurveyState.objects.filter(pk=loaded.pk).update(rounds=50, version=loaded.version)
        loaded.reward = Decimal(1)

    after_a_step(state, change)

    assert (state.rounds, state.reward) == (50, Decimal(1))


def test_changes_say_from_what_to_what() -> None:
    state = SurveyState.objects.create(reward=Decimal("1.50"), answers={"a": 1})

    def change(loaded: SurveyState) -> None:
        loaded.reward = Decimal("2.25")
        loaded.asked_at = WHEN
        loaded.answers["b"] = 2

    delivery = after_a_step(state, change)

    assert delivery.changes == {
        "reward": ["1.50", "2.25"],
        "asked_at": [None, "2026-03-01T12:30:15.123Z"],
        "answers": [{"a": 1}, {"a": 1, "b": 2}],
    }
    assert (delivery.step, delivery.version, delivery.instance_id) == ("step", 2, state.pk)


def test_changes_of_a_start_leave_out_what_kept_its_default() -> None:
    after_a_start(ParcelState, lambda state: setattr(state, "customer", "acme"))

    delivery = Delivery.objects.get()
    assert delivery.changes == {"customer": ["", "acme"]}
    assert (delivery.step, delivery.version) == ("start", 1)


def test_auto_now_is_moved_on_by_a_step_that_changes_something_and_by_no_other() -> None:
    state = SurveyState.objects.create()
    SurveyState.objects.update(touched_at=WHEN, made_at=WHEN, version=1)
    state.refresh_from_db()

    after_a_step(state, lambda s: setattr(s, "reward", Decimal(1)))

    assert timezone.now() - state.touched_at < timedelta(minutes=1)
    assert state.made_at == WHEN


def test_a_start_fills_auto_now_and_auto_now_add() -> None:
    state = after_a_start(SurveyState, lambda s: None)

    assert timezone.now() - state.touched_at < timedelta(minutes=1)
    assert timezone.now() - state.made_at < timedelta(minutes=1)


def test_a_start_leaves_a_db_default_to_the_database() -> None:
    state = after_a_start(SurveyState, lambda s: None)

    assert state.rounds == 7


@pytest.mark.parametrize("starts", [True, False])
def test_an_expression_is_an_error_that_says_what_to_assign_instead(starts: bool) -> None:
    def change(state: SurveyState) -> None:
        state.rounds = F("rounds") + 1

    if starts:
        with pytest.raises(SurveyState.DoesNotExist):
            after_a_start(SurveyState, change)
        delivery = Delivery.objects.get()
    else:
        delivery = after_a_step(SurveyState.objects.create(), change)

    assert delivery.status == Status.PENDING
    assert "assigned an expression to tests.SurveyState.rounds. Assign a value" in delivery.error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", uuid4()),
        ("version", 5),
        ("lifecycle", "completed"),
        ("ended_at", WHEN),
        ("starter_workflow", "tests.Other"),
    ],
)
@pytest.mark.parametrize("starts", [True, False])
def test_a_field_that_the_engine_writes_is_an_error_that_names_it(
    field: str, value: Any, starts: bool
) -> None:
    def change(state: SurveyState) -> None:
        setattr(state, field, value)

    if starts:
        with pytest.raises(SurveyState.DoesNotExist):
            after_a_start(SurveyState, change)
        delivery = Delivery.objects.get()
    else:
        state = SurveyState.objects.create()
        delivery = after_a_step(state, change)
        assert state.version == 1

    assert delivery.status == Status.PENDING
    assert f"The step set tests.SurveyState.{field}, which the engine alone writes" in (
        delivery.error
    )


@pytest.mark.postgres
@pytest.mark.parametrize("starts", [True, False])
def test_an_array_field_is_saved_also_when_it_was_changed_in_place(starts: bool) -> None:
    def change(state: TaggedState) -> None:
        state.tags.append("fragile")

    if starts:
        state = after_a_start(TaggedState, change)
    else:
        state = TaggedState.objects.create(tags=["heavy"])
        after_a_step(state, change)

    assert state.tags == (["fragile"] if starts else ["heavy", "fragile"])
    assert Delivery.objects.get().changes == {"tags": [state.tags[:-1], state.tags]}
