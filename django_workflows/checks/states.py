"""The models of the workflows' states."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.core.checks import CheckMessage
from django.db.models import signals

from django_workflows import registry
from django_workflows.checks.reports import Problems, error, path, warning
from django_workflows.errors import did_you_mean
from django_workflows.instances import MANAGED
from django_workflows.models import WorkflowState, WorkflowStateQuerySet

State = type[WorkflowState]


def check_states(**_kwargs: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for state in dict.fromkeys(workflow.state for workflow in registry.current().workflows):
        kind = kind_of(state)
        found += redeclared_fields(state)
        found += hidden_names(state)
        if kind:
            found.append(no_table_of_its_own(state, kind))
            continue
        found += unknown_sensitive_fields(state)
        found += odd_retention(state)
        found += other_querysets(state)
        found += overridden_save(state)
        found += receivers_of_signals(state)
    return found


def kind_of(state: State) -> str:
    """What the model is, unless it has a table of its own with all of its columns."""
    if state._meta.abstract:
        return "abstract"
    if state._meta.proxy:
        return "a proxy"
    return "a multi-table child" if state._meta.parents else ""


def no_table_of_its_own(state: State, kind: str) -> CheckMessage:
    """E016: an instance is one row of one table."""
    return error(
        16,
        f"The state {path(state)} is {kind}, and an instance must be one row of its own table.",
        f"Let {state.__name__} extend WorkflowState, or an abstract model that does, and be "
        f"concrete.",
        state if not state._meta.abstract else path(state),
    )


def redeclared_fields(state: State) -> Problems:
    """E013: the engine's own fields are as it declares them."""
    own = {field.name: field for field in state._meta.fields}
    for field in WorkflowState._meta.fields:
        redeclared = own.get(field.name)
        # A copy that was inherited keeps the counter of the original.
        if redeclared is None or redeclared.creation_counter != field.creation_counter:
            yield error(
                13,
                f"{path(state)} declares {field.name!r} anew, a field of WorkflowState that the "
                f"engine writes.",
                f"Give the field of {state.__name__} another name; 'status' is free.",
                path(state),
            )


def hidden_names(state: State) -> Problems:
    """E013: nor does a field take the name of anything else of the base."""
    inherited = {field.name for field in WorkflowState._meta.fields}
    for field in state._meta.fields:
        for name in dict.fromkeys((field.name, field.attname)):
            if name not in inherited and hasattr(WorkflowState, name):
                yield error(
                    13,
                    f"The field {name!r} of {path(state)} hides a name of WorkflowState.",
                    f"Give the field of {state.__name__} another name.",
                    path(state),
                )


def unknown_sensitive_fields(state: State) -> Problems:
    """E024: a misspelt name would leave the value for all to see."""
    given: Any = state.sensitive_fields
    known = [field.name for field in state._meta.concrete_fields if field.attname not in MANAGED]
    if isinstance(given, str) or not isinstance(given, Iterable):
        yield error(
            24,
            f"{path(state)}.sensitive_fields is {given!r:.100}, which is no list of names.",
            f"Write sensitive_fields = ({given!r:.100},) in {state.__name__}.",
            state,
        )
        return
    for name in given:
        if name not in known:
            yield error(
                24,
                f"{path(state)}.sensitive_fields names {name!r}, which is no field of its own.",
                f"{did_you_mean(str(name), known)} Correct or remove {name!r}.",
                state,
            )


def odd_retention(state: State) -> Problems:
    """E025: how long an ended instance is kept."""
    given: Any = state.workflow_retention
    if given is not None and not (isinstance(given, timedelta) and given >= timedelta(0)):
        yield error(
            25,
            f"{path(state)}.workflow_retention is {given!r:.100}, which is no span of time.",
            f"Give {state.__name__} a timedelta of zero or more, or None for RETENTION.",
            state,
        )


def other_querysets(state: State) -> Problems:
    """E017: an update outside a step moves the version on."""
    manager = state._default_manager
    if not isinstance(manager.get_queryset(), WorkflowStateQuerySet):
        yield error(
            17,
            f"The default manager {manager.name!r} of {path(state)} has no WorkflowStateQuerySet: "
            f"what it updates, a running step would overwrite.",
            f"Build {state.__name__}.{manager.name} with WorkflowStateQuerySet.as_manager(), or "
            f"from a queryset class that extends it.",
            state,
        )


def overridden_save(state: State) -> Problems:
    """W001: a step saves with a statement of its own."""
    if state.save is not WorkflowState.save:
        yield warning(
            1,
            f"{path(state)} overrides save(), which is not called when a step saves it.",
            f"Move what {state.__name__}.save() does into the steps, or into Field.pre_save, "
            f"which runs in both cases.",
            state,
        )


def receivers_of_signals(state: State) -> Problems:
    """W002: and sends no signals of models."""
    for name in ("pre_save", "post_save"):
        signal: Any = getattr(signals, name)
        if signal.has_listeners(state) and not signal.has_listeners(WorkflowState):
            yield warning(
                2,
                f"A receiver waits for {name} of {path(state)}, which is not sent when a step "
                f"saves it.",
                f"Use the signals of django_workflows (delivery_handled, workflow_started, "
                f"workflow_completed) with sender={state.__name__}, or do it in the step.",
                state,
            )
