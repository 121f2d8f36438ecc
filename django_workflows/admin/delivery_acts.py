"""What can be done to deliveries by hand, and what each of it means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_workflows import registry, replaying
from django_workflows.admin.actions import Act, Answers, Preview, in_words
from django_workflows.batching import OnBatch
from django_workflows.cancelling import cancel_deliveries, cancellable
from django_workflows.declarations import Handler, WorkflowDefinition
from django_workflows.models import Delivery, Status, WorkflowStateQuerySet
from django_workflows.notices import CommandFailed
from django_workflows.rescheduling import make_due, waiting
from django_workflows.running import read
from django_workflows.skipping import skip, skippable

COLUMNS = ("message_name", "handler", "status", "undoes")


# Replay


def _replay(rows: Any, answers: Answers, limit: int, on_batch: OnBatch) -> int:
    return replaying.replay(rows, limit=limit, on_batch=on_batch)


def after_a_replay(preview: Preview) -> Iterable[str]:
    yield in_words(
        preview.count,
        "It is due at once, and is handled again by what it is for, with a fresh count of "
        "attempts.",
        "They are due at once, and are handled again by what they are for, each with a fresh "
        "count of attempts.",
    )
    yield gettext(
        "What failed has left nothing in the database. What a handler did outside of it before "
        "it failed, such as a mail or a payment, it may do again."
    )
    yield from _without_transaction(preview)
    yield from _not_declared(preview)
    if count := _undoing(preview):
        yield in_words(
            count,
            "%(count)d is an undo command: once it is handled, the undoing of its instance goes "
            "on. If that instance undoes nothing now, only this command runs.",
            "%(count)d are undo commands: once they are handled, the undoing of their instances "
            "goes on. Where an instance undoes nothing now, only the command itself runs.",
        )
    if len(preview.rows) == 1:
        yield from outlook_of(preview.rows[0])


REPLAY = Act(
    name="replay_selected",
    title=_("Replay"),
    permission="replay_delivery",
    fits=replaying.replayable,
    run=_replay,
    follows=after_a_replay,
    done=lambda count: in_words(
        count,
        "%(count)d delivery will be handled again.",
        "%(count)d deliveries will be handled again.",
    ),
    none_fits=_(
        "Only failed, ignored and cancelled deliveries can be replayed. What is pending will be "
        "tried again by itself; Make due now brings it forward."
    ),
    log_message="Replayed.",
    columns=COLUMNS,
)


# Cancel


def _cancel(rows: Any, answers: Answers, limit: int, on_batch: OnBatch) -> int:
    reason = f"Cancelled by {answers.who}{': ' if answers.reason else '.'}{answers.reason}"
    return cancel_deliveries(rows, reason=reason, limit=limit, on_batch=on_batch)


def after_a_cancellation(preview: Preview) -> Iterable[str]:
    yield in_words(
        preview.count,
        "It is not handled, unless it is replayed later.",
        "They are not handled, unless they are replayed later.",
    )
    yield gettext(
        "Nobody is told: an instance that waits for an answer to one of them goes on waiting."
    )
    if count := sum(row[-1] for row in preview.groups if row[2] == Status.NOTED):
        yield in_words(
            count,
            "%(count)d is noted by an instance to undo what it did; that is not undone then.",
            "%(count)d are noted by instances to undo what they did; that is not undone then.",
        )


CANCEL = Act(
    name="cancel_selected",
    title=_("Cancel"),
    permission="cancel_delivery",
    fits=cancellable,
    run=_cancel,
    follows=after_a_cancellation,
    done=lambda count: in_words(
        count, "%(count)d delivery was cancelled.", "%(count)d deliveries were cancelled."
    ),
    none_fits=_(
        "Only deliveries that wait can be cancelled. What has failed, and an undo command that "
        "has left, can be skipped."
    ),
    log_message="Cancelled.",
    columns=COLUMNS,
    asks_reason=True,
)


# Skip


def _skip(rows: Any, answers: Answers, limit: int, on_batch: OnBatch) -> int:
    reason = f"Handled by hand, says {answers.who}: {answers.reason}"
    return skip(rows, reason=reason, limit=limit, on_batch=on_batch)


def after_a_skip(preview: Preview) -> Iterable[str]:
    yield in_words(
        preview.count,
        "It is marked as handled, with your name and the reason, and is not run or replayed any "
        "more.",
        "They are marked as handled, with your name and the reason, and are not run or replayed "
        "any more.",
    )
    yield gettext(
        "Nothing is sent in its place: an instance that waits for what the handler would have "
        "answered goes on waiting."
    )
    if count := _undoing(preview):
        yield in_words(
            count,
            "%(count)d is an undo command: the undoing of its instance goes on after it, with the "
            "next command or with the end of the instance.",
            "%(count)d are undo commands: the undoing of their instances goes on after them, with "
            "the next command or with the end of the instance.",
        )


SKIP = Act(
    name="skip_selected",
    title=_("Skip: handled by hand"),
    permission="skip_delivery",
    fits=skippable,
    run=_skip,
    follows=after_a_skip,
    done=lambda count: in_words(
        count,
        "%(count)d delivery was marked as handled by hand.",
        "%(count)d deliveries were marked as handled by hand.",
    ),
    none_fits=_("Only deliveries that have failed, or wait, can be skipped."),
    log_message="Marked as handled by hand.",
    columns=COLUMNS,
    asks_reason=True,
    needs_reason=True,
)


# Make due


def _make_due(rows: Any, answers: Answers, limit: int, on_batch: OnBatch) -> int:
    return make_due(rows, limit=limit, on_batch=on_batch)


def after_making_due(preview: Preview) -> Iterable[str]:
    yield in_words(
        preview.count,
        "It is handled as soon as a worker is free, and not only at the time that it waits for.",
        "They are handled as soon as workers are free, and not only at the times that they wait "
        "for.",
    )
    yield gettext(
        "A timeout does now what it would have done then; a retry uses up one of its attempts."
    )


MAKE_DUE = Act(
    name="make_due_selected",
    title=_("Make due now"),
    permission="reschedule_delivery",
    fits=waiting,
    run=_make_due,
    follows=after_making_due,
    done=lambda count: in_words(
        count, "%(count)d delivery is due now.", "%(count)d deliveries are due now."
    ),
    none_fits=_(
        "Only deliveries that wait for a later time can be made due. What waits for its instance "
        "is due as soon as there is one."
    ),
    log_message="Made due at once.",
    columns=COLUMNS,
)

ACTS = (REPLAY, SKIP, CANCEL, MAKE_DUE)


# What a replay of one would meet


def outlook_of(delivery: Delivery) -> Iterable[str]:
    """What is to be expected of a replay, as far as that can be said."""
    try:
        recipient, _message = read(delivery)
    except Exception as error:
        yield gettext("As things are, it would fail again: %(error)s") % {"error": error}
        return
    if isinstance(recipient, WorkflowDefinition):
        yield from _outlook_for(recipient, delivery.instance_id, itself=True)
    sender = registry.current().recipient(delivery.sender)
    if isinstance(sender, WorkflowDefinition) and delivery.status == Status.FAILED:
        if not delivery.undoes and _is_told(sender, delivery):
            yield gettext("The instance that sent it was told that it had failed.")
        yield from _outlook_for(sender, delivery.sender_instance_id, itself=False)


def _outlook_for(definition: WorkflowDefinition, pk: Any, *, itself: bool) -> Iterable[str]:
    rows = WorkflowStateQuerySet(definition.state).filter(pk=pk) if pk else None
    instance = rows.first() if rows is not None else None
    if instance is None or instance.lifecycle == "running":
        return
    named = {"name": definition.name, "lifecycle": instance.get_lifecycle_display()}
    if not instance.is_live and itself:
        yield (
            gettext("Its instance of %(name)s has ended (%(lifecycle)s), so it would be ignored.")
            % named
        )
    elif not itself:
        yield gettext("The instance of %(name)s that sent it is %(lifecycle)s by now.") % named


def _is_told(sender: WorkflowDefinition, delivery: Delivery) -> bool:
    return any(
        step.message is CommandFailed and delivery.message_name in step.about.stored_names()
        for step in sender.steps
    )


def _undoing(preview: Preview) -> int:
    return sum(row[-1] for row in preview.groups if row[3])


def _without_transaction(preview: Preview) -> Iterable[str]:
    found = {row[1]: registry.current().recipient(row[1]) for row in preview.groups}
    names = sorted(
        name for name, one in found.items() if isinstance(one, Handler) and not one.atomic
    )
    if names:
        text = ngettext(
            "%(names)s runs without a transaction: what it wrote before it failed is there.",
            "%(names)s run without a transaction: what they wrote before they failed is there.",
            len(names),
        )
        yield text % {"names": ", ".join(names)}


def _not_declared(preview: Preview) -> Iterable[str]:
    names = sorted({row[1] for row in preview.groups if not registry.current().recipient(row[1])})
    if names and len(preview.rows) != 1:
        yield gettext(
            "Nothing is declared here by the name of %(names)s: these would be tried for a while "
            "and fail again."
        ) % {"names": ", ".join(names)}
