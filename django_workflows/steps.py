"""One step of an instance, and what follows from it."""

from __future__ import annotations

from typing import Any

from django_workflows import compensation, joins, outbox, parking, statements, telling
from django_workflows.context import Context, Effects, entered
from django_workflows.endings import Handled, Ignored
from django_workflows.finding import Run, Target
from django_workflows.finishing import finish, origin_of, require_commit
from django_workflows.instances import difference
from django_workflows.messages import from_json
from django_workflows.models import Lifecycle, Status, WorkflowState
from django_workflows.notices import CommandFailed, JoinComplete
from django_workflows.outbox import Origin


def run_target(run: Run, target: Target) -> Handled | Ignored:
    """Run the step, or record that one of the messages that it waits for has arrived."""
    if not target.step.starts:
        run.delivery.instance_id = target.instance.pk  # stored with a failure, too
    if target.step.join and not isinstance(run.message, JoinComplete):
        return arrive(run, target)
    return run_step(run, target)


def arrive(run: Run, target: Target) -> Handled | Ignored:
    """Record that a message of a join is there; the version of the instance stays."""
    step, instance = target.step, target.instance
    facts: dict[str, Any] = {"instance_id": instance.pk, "conflicts": run.conflicts}
    counts, is_complete = joins.arrivals(run.cursor, run.definition, step, instance)
    if is_complete:
        reason = f"The join {step.name} of {run.definition.name} {instance.pk} is complete."
        finish(run.cursor, run.delivery, status=Status.IGNORED, reason=reason, **facts)
        return Ignored(reason, instance.pk)
    finish(run.cursor, run.delivery, status=Status.HANDLED, step=step.name, **facts)
    origin = origin_of(run.delivery, run.definition.name, step.name, instance)
    name = run.delivery.message_name
    counts[name] = counts.get(name, 0) + 1  # it was not handled yet when they were counted
    joins.complete(run.cursor, run.definition, step, instance, origin, counts)
    return Handled()


def run_step(run: Run, target: Target) -> Handled:
    """Call the step, then write: state, cancelled, sent, what else follows, the mark of the end."""
    step, instance, definition = target.step, target.instance, run.definition
    effects = Effects()
    origin = origin_of(run.delivery, definition.name, step.name, instance)
    context: Context = definition.context_class(run.delivery, origin, effects, instance, definition)
    with entered(context):
        definition.run(step, arguments_of(run, target), context)
    require_commit(run.cursor)
    changed: list[Any] = []
    if not effects.discarded:
        changed = save(run, target, effects)
        cancel(run, instance, effects)
    outbox.write(run.cursor, effects.outgoing)
    if effects.discarded:
        compensation.forget(effects.noted)
    else:
        see_to_others(run, target, effects, changed, origin)
    exists = not (step.starts and effects.discarded)
    finish(
        run.cursor,
        run.delivery,
        status=Status.HANDLED,
        reason="The step discarded its changes." if effects.discarded else "",
        instance_id=instance.pk if exists else None,
        step=step.name,
        version=instance.version if exists else None,
        changes=difference(instance, target.before, changed),
        conflicts=run.conflicts,
    )
    return Handled(instance if exists else None, started=step.starts and exists)


def arguments_of(run: Run, target: Target) -> tuple[Any, ...]:
    """What the step is called with: the message, or what the notice is about."""
    match run.message:
        case CommandFailed() as failure:
            return from_json(target.step.about, failure.body), failure
        case JoinComplete():
            return (joins.arrived(run.definition, target.step, target.instance),)
    return (run.message,)


def save(run: Run, target: Target, effects: Effects) -> list[Any]:
    """Write the instance if the step changed it or did anything; the fields that it changed."""
    table, instance, starts = run.table, target.instance, target.step.starts
    changed = table.changed(instance, target.before)
    if effects.ending:
        instance.lifecycle = effects.ending
    if effects.ending == Lifecycle.COMPENSATING and not has_notes(instance, effects):
        instance.lifecycle = Lifecycle.COMPENSATED
    keys = parking.keys_of(run.definition, instance, None if starts else changed)
    parking.lock(run.cursor, keys)
    if starts:
        table.insert(run.cursor, instance)
    elif changed or effects.has_any:
        # The version moves on even if only something was sent: two copies cannot both commit.
        table.update(run.cursor, instance, changed)
    parking.let_go(keys)
    return changed


def has_notes(instance: WorkflowState, effects: Effects) -> bool:
    return bool(effects.notes) or compensation.is_noted(instance)


def cancel(run: Run, instance: WorkflowState, effects: Effects) -> None:
    """Cancel what the instance has waiting for itself: of some names, or all at its end."""
    if not effects.cancelled and not effects.ending:
        return
    if effects.ending:
        effects.outgoing[:] = [new for new in effects.outgoing if new.instance_id != instance.pk]
    statements.cancel(
        run.cursor,
        workflows=run.definition.names,
        instance_id=instance.pk,
        names=None if effects.ending else sorted(effects.cancelled),
        kept=[run.delivery.id] if effects.ending else [run.delivery.id, *effects.sent],
        reason=f"Cancelled by {run.definition.name}.",
        with_notes=effects.ending == Lifecycle.COMPLETED,
    )


def see_to_others(
    run: Run, target: Target, effects: Effects, changed: list[Any], origin: Origin
) -> None:
    """What a step means for its notes, for joins, and for the instance that started this one."""
    instance = target.instance
    if effects.ending != Lifecycle.COMPLETED:
        compensation.note(run.cursor, effects.notes, instance.version)
    if instance.lifecycle == Lifecycle.COMPENSATING and effects.ending:
        compensation.send_next(instance.pk)
    for step in run.definition.joins.values():
        if step.join and step.join.may_complete(changed, starts=target.step.starts):
            counts, _is_complete = joins.arrivals(run.cursor, run.definition, step, instance)
            joins.complete(run.cursor, run.definition, step, instance, origin, counts)
    if not instance.is_live:
        telling.tell_starter(run.cursor, run.definition, instance, origin)
