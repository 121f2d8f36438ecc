"""One step of an instance, and what follows from it."""

from __future__ import annotations

from typing import Any

from django_workflows import compensation, joins, outbox, parking, statements, telling
from django_workflows.context import Context, Effects, entered
from django_workflows.declarations import Step, WorkflowDefinition
from django_workflows.endings import Handled, Ignored
from django_workflows.finding import Target
from django_workflows.finishing import finish, origin_of, require_commit
from django_workflows.instances import StateTable, difference
from django_workflows.messages import Message, from_json
from django_workflows.models import Delivery, Lifecycle, Status, WorkflowState
from django_workflows.notices import CommandFailed, JoinComplete
from django_workflows.outbox import Origin


def arrive(
    delivery: Delivery,
    definition: WorkflowDefinition,
    step: Step,
    instance: WorkflowState,
    conflicts: int,
) -> Handled | Ignored:
    """Record that a message of a join is there; the version of the instance stays."""
    facts: dict[str, Any] = {"instance_id": instance.pk, "conflicts": conflicts}
    if joins.has_completed(definition, step, instance):
        reason = f"The join {step.name} of {definition.name} {instance.pk} is complete."
        finish(delivery, status=Status.IGNORED, reason=reason, **facts)
        return Ignored(reason, instance.pk)
    finish(delivery, status=Status.HANDLED, step=step.name, **facts)
    joins.complete(definition, step, instance, origin_of(delivery, definition.name, step.name))
    return Handled()


def run_step(
    delivery: Delivery,
    definition: WorkflowDefinition,
    message: Message,
    table: StateTable,
    target: Target,
    conflicts: int,
) -> Handled:
    """Call the step, then write in this order: state, cancelled, sent, the mark of the end."""
    effects = Effects()
    step, instance = target.step, target.instance
    origin = origin_of(delivery, definition.name, step.name)
    context: Context = definition.context_class(delivery, origin, effects, instance, definition)
    with entered(context):
        definition.run(step, arguments_of(definition, step, message, instance), context)
    require_commit()
    changed = save(definition, table, target, effects)
    if not effects.discarded:
        cancel(delivery, definition, instance, effects)
    outbox.write(effects.outgoing)
    if not effects.discarded:
        see_to_others(definition, target, effects, changed, origin)
    exists = not (step.starts and effects.discarded)
    finish(
        delivery,
        status=Status.HANDLED,
        reason="The step discarded its changes." if effects.discarded else "",
        instance_id=instance.pk if exists else None,
        step=step.name,
        version=instance.version if exists else None,
        changes=difference(instance, target.before, changed),
        conflicts=conflicts,
    )
    return Handled(instance if exists else None, started=step.starts and exists)


def arguments_of(
    definition: WorkflowDefinition, step: Step, message: Message, instance: WorkflowState
) -> tuple[Any, ...]:
    """What the step is called with: the message, or what the notice is about."""
    if isinstance(message, CommandFailed):
        return from_json(step.about, message.body), message
    if isinstance(message, JoinComplete):
        return (joins.arrived(definition, step, instance),)
    return (message,)


def save(
    definition: WorkflowDefinition, table: StateTable, target: Target, effects: Effects
) -> list[Any]:
    """Write the instance if the step changed it or did anything; the fields that it changed."""
    if effects.discarded:
        return []
    connection, instance = outbox.database(), target.instance
    changed = table.changed(instance, target.before)
    if effects.ending:
        instance.lifecycle = effects.ending
    if effects.ending == Lifecycle.COMPENSATING and not has_notes(instance, effects):
        instance.lifecycle = Lifecycle.COMPENSATED
    keys = parking.keys_of(definition, instance, None if target.step.starts else changed)
    parking.lock(keys)
    if target.step.starts:
        table.insert(connection, instance)
    elif changed or effects.has_any:
        # The version moves on even if only something was sent: two copies cannot both commit.
        table.update(connection, instance, changed)
    parking.let_go(keys)
    return changed


def has_notes(instance: WorkflowState, effects: Effects) -> bool:
    return bool(effects.notes) or compensation.is_noted(instance)


def see_to_others(
    definition: WorkflowDefinition,
    target: Target,
    effects: Effects,
    changed: list[Any],
    origin: Origin,
) -> None:
    """What a step means for its notes, for joins, and for the instance that started this one."""
    instance = target.instance
    compensation.note(effects.notes, instance.version)
    if instance.lifecycle == Lifecycle.COMPENSATING and effects.ending:
        compensation.send_next(instance.pk)
    for step in definition.joins.values():
        if step.join and step.join.may_complete(changed, starts=target.step.starts):
            joins.complete(definition, step, instance, origin)
    if not instance.is_live:
        telling.tell_starter(definition, instance, origin)


def cancel(
    delivery: Delivery, definition: WorkflowDefinition, instance: WorkflowState, effects: Effects
) -> None:
    """Cancel what the instance has waiting for itself: of some names, or all at its end."""
    if not effects.cancelled and not effects.ending:
        return
    if effects.ending:
        effects.outgoing[:] = [d for d in effects.outgoing if d.instance_id != instance.pk]
    statements.cancel(
        outbox.database(),
        workflows=definition.names,
        instance_id=instance.pk,
        names=None if effects.ending else sorted(effects.cancelled),
        kept=[delivery.id] if effects.ending else [delivery.id, *effects.sent],
        reason=f"Cancelled by {definition.name}.",
        with_notes=effects.ending == Lifecycle.COMPLETED,
    )
