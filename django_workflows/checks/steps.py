"""What a workflow's steps say about finding and starting its instances."""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Union, get_args, get_origin
from uuid import UUID

from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Q, UniqueConstraint

from django_workflows import registry
from django_workflows.checks.reports import (
    Problems,
    error,
    is_message,
    path,
    place,
    place_of_step,
    steps,
)
from django_workflows.declarations import IfMissing, Step, WorkflowDefinition, wait
from django_workflows.errors import did_you_mean
from django_workflows.models import WorkflowState
from django_workflows.notices import JoinComplete


def check_steps(**_kwargs: Any) -> list[CheckMessage]:
    found = [*never_started(), *two_steps_for_one_message()]
    for workflow, step in steps():
        found += check_lookup(workflow, step)
        found += unknown_if_missing(workflow, step)
    return found


def never_started() -> Problems:
    """E004: a workflow without a start has no instance, ever."""
    for workflow in registry.current().workflows:
        if not any(step.starts for step in workflow.steps):
            yield error(
                4,
                f"Nothing starts the workflow {place(workflow)}.",
                "Decorate the step that creates its instances with @started_by(Message).",
                place(workflow),
            )


def two_steps_for_one_message() -> Problems:
    """E005: a message runs one step of an instance."""
    for workflow in registry.current().workflows:
        for what, count in Counter(map(reaction, workflow.steps)).items():
            if count > 1:
                same = [step for step in workflow.steps if reaction(step) == what]
                labels = " and ".join(dict.fromkeys(step.decorator for step in same))
                yield error(
                    5,
                    f"The workflow {place(workflow)} has {count} steps {labels}: "
                    f"{', '.join(step.name for step in same)}. Only the first would run.",
                    "Make them one step. (A start and a continuing step may share a message.)",
                    place(workflow),
                )


def reaction(step: Step) -> tuple[Any, ...]:
    """What only one step of a workflow may react to."""
    about = step.name if step.message is JoinComplete else step.about
    return step.starts, step.message, about


def unknown_if_missing(workflow: WorkflowDefinition, step: Step) -> Problems:
    """E022: `if_missing` is one of its values."""
    known = get_args(get_args(IfMissing)[0])
    if step.if_missing not in known and not isinstance(step.if_missing, wait):
        where = place_of_step(workflow, step)
        yield error(
            22,
            f"{where} has if_missing={step.if_missing!r}, which is none of "
            f"{', '.join(map(repr, known))}.",
            did_you_mean(str(step.if_missing), known),
            where,
        )


def check_lookup(workflow: WorkflowDefinition, step: Step) -> Problems:
    """E006 to E011, E014: the lookup, the field that it maps to, and whether they fit."""
    where, state = place_of_step(workflow, step), workflow.state
    keyword = "once_per" if step.starts else "maps_to"
    if step.lookup is None and step.maps_to is None:
        return
    if step.lookup is None:
        yield error(
            9,
            f"{where} has maps_to={step.maps_to!r} without a lookup, so the instance is found by "
            f"the workflow id alone.",
            "Say with lookup= which value of the message must equal the field, or remove maps_to.",
            where,
        )
        return
    if isinstance(step.lookup, str):
        yield from unknown_message_field(step, where, keyword)
    if step.maps_to is None:
        yield error(
            8,
            f"{where} has a lookup without {keyword}.",
            f"Say with {keyword}= which field of {path(state)} the looked up value must equal.",
            where,
        )
        return
    field = _field(state, step.maps_to)
    if field is None:
        yield error(
            6,
            f"{where} has {keyword}={step.maps_to!r}, which is no field of {path(state)}.",
            f"{did_you_mean(step.maps_to, _own_fields(state))} Name a field of {state.__name__} "
            f"with {keyword}=.",
            where,
        )
        return
    yield from never_matches(step, field, where)
    if step.starts and not _is_unique(state, field):
        yield error(
            14,
            f"{where} starts one instance once_per={step.maps_to!r}, and {path(state)}."
            f"{field.name} is not unique.",
            f"Declare {field.name} with unique=True, or a UniqueConstraint of that field alone "
            f"that is not deferred, on {state.__name__}. It may have the condition "
            f"Q(ended_at__isnull=True), for one at a time.",
            where,
        )
    if not step.starts and not _is_indexed(state, field):
        yield error(
            10,
            f"{where} looks up instances by {path(state)}.{field.name}, which has no index.",
            f"Declare {field.name} with db_index=True or unique=True, or give {state.__name__} an "
            f"index that begins with it: every message reads the whole table without.",
            where,
        )


def unknown_message_field(step: Step, where: str, keyword: str) -> Problems:
    """E007: a lookup that is a text is a field of the message."""
    if not is_message(step.message) or step.lookup in step.message.model_fields:
        return
    given = f"lookup={step.lookup!r}"
    if step.starts and step.lookup == step.maps_to:
        given = f"once_per={step.lookup!r} without a lookup"
    yield error(
        7,
        f"{where} has {given}, and {path(step.message)} has no field {step.lookup!r}.",
        f"{did_you_mean(str(step.lookup), step.message.model_fields)} Name a field of "
        f"{step.message.__name__} with lookup=, or pass a function of the message.",
        where,
    )


# Fields


def _field(state: type[WorkflowState], name: str) -> Any:
    """The field, if it is one with a column."""
    try:
        field = state._meta.get_field(name)
    except FieldDoesNotExist:
        return None
    return field if field.concrete and field.column else None


def _own_fields(state: type[WorkflowState]) -> list[str]:
    """The names of the fields that the user declared."""
    base = {field.name for field in WorkflowState._meta.fields}
    return [field.name for field in state._meta.concrete_fields if field.name not in base]


def _is_unique(state: type[WorkflowState], field: Any) -> bool:
    """Whether the database refuses, at INSERT, a second row with the same value.

    A constraint among the instances that have not ended will do: the condition is the user's
    word that an ended instance makes room for the next.
    """
    if field.unique or (field.name,) in map(tuple, state._meta.unique_together):
        return True
    return any(
        isinstance(constraint, UniqueConstraint)
        and tuple(constraint.fields) == (field.name,)
        and not constraint.deferrable
        and _covers_the_live(constraint.condition)
        for constraint in state._meta.constraints
    )


def _is_indexed(state: type[WorkflowState], field: Any) -> bool:
    """Whether the database finds the live instances of a value without reading them all."""
    if field.unique or field.db_index:
        return True
    columns = [
        *(
            index.fields
            for index in state._meta.indexes
            if index.suffix in _ORDERED and _covers_the_live(index.condition)
        ),
        *(
            constraint.fields
            for constraint in state._meta.constraints
            if isinstance(constraint, UniqueConstraint) and _covers_the_live(constraint.condition)
        ),
        *state._meta.unique_together,
    ]
    return any(names and names[0].removeprefix("-") == field.name for names in columns)


#: The kinds of index that answer "equals": Index and BTreeIndex, HashIndex.
_ORDERED = ("idx", "btree", "hash")


def _covers_the_live(condition: Q | None) -> bool:
    return condition is None or condition == Q(ended_at__isnull=True)


# Types


def never_matches(step: Step, field: Any, where: str) -> Problems:
    """E011: some value of the message's field can be one of the state's field."""
    if not isinstance(step.lookup, str) or not is_message(step.message):
        return
    info = step.message.model_fields.get(step.lookup)
    target = field.target_field if field.is_relation else field
    if info is None or _can_match(info.annotation, target):
        return
    yield error(
        11,
        f"{where} looks up {path(step.message)}.{step.lookup}, which is "
        f"{getattr(info.annotation, '__name__', info.annotation)}, in {path(field.model)}."
        f"{field.name}, which is a {type(target).__name__} and can never equal it.",
        f"Give {step.message.__name__}.{step.lookup} the type of the field, or convert it with "
        f"lookup=lambda message: ...",
        where,
    )


def _can_match(annotation: Any, field: Any) -> bool:
    """Whether a value of this type may become the field's; False only where none ever can."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(_can_match(a, field) for a in get_args(annotation) if a is not type(None))
    if origin is Annotated:
        return _can_match(get_args(annotation)[0], field)
    samples = _SAMPLES.get(origin or annotation)
    return samples is None or any(_becomes(sample, field) for sample in samples)


def _becomes(value: Any, field: Any) -> bool:
    """Whether the field converts the value, as the engine does with every key."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a date as a moment is naive, which is no matter here
        try:
            field.to_python(value)
        except (ValidationError, ValueError, TypeError, ArithmeticError, AttributeError):
            return False
    return True


#: Values that stand for all of their type. A type that is not here, such as str, may match.
_SAMPLES: Mapping[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (0, 1, 7),
    float: (0.0, 1.0, 0.5),
    Decimal: (Decimal(0), Decimal(1), Decimal("0.5")),
    UUID: (UUID(int=0), UUID("6ba7b810-9dad-41d1-80b4-00c04fd430c8")),
    date: (date(2026, 2, 28),),
    datetime: (datetime(2026, 2, 28, 12, tzinfo=UTC),),
    time: (time(12),),
    timedelta: (timedelta(0), timedelta(days=1)),
    bytes: (b"1",),
    list: ([], [1]),
    dict: ({}, {"a": 1}),
    set: (set(), {1}),
    tuple: ((), (1,)),
}
