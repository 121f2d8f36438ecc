"""What can be done to instances by hand, and what each of it means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import Exists, OuterRef
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_workflows import replaying
from django_workflows.admin.actions import Act, Answers, Preview, in_words
from django_workflows.batching import OnBatch
from django_workflows.cancelling import cancel_instance
from django_workflows.models import LIVE, Delivery, Lifecycle, Status

COLUMNS = ("lifecycle",)
#: Instances of one transaction.
BATCH = 50


# Cancel


def live(instances: Any) -> Any:
    return instances.filter(lifecycle__in=LIVE)


def _cancel(instances: Any, answers: Answers, limit: int, on_batch: OnBatch) -> int:
    reason = f"Its instance was cancelled by {answers.who}"
    reason += f": {answers.reason}" if answers.reason else "."
    cancelled = [
        instance
        for instance in live(instances).order_by("pk")[:limit]
        if cancel_instance(instance, reason=reason, cascade=answers.cascade)
    ]
    on_batch(cancelled)
    return len(cancelled)


def after_a_cancellation(preview: Preview) -> Iterable[str]:
    yield in_words(
        preview.count,
        "It ends as cancelled and handles no message any more. That cannot be taken back.",
        "They end as cancelled and handle no message any more. That cannot be taken back.",
    )
    yield gettext(
        "What waits for it, such as timeouts, is cancelled, and so is what it has noted to undo: "
        "what it did stays done."
    )
    yield gettext("Commands that it has sent to others are handled all the same.")
    yield gettext("A workflow that started it is told, if it has a step for that.")


CANCEL = Act(
    name="cancel_instances",
    title=_("Cancel the instance"),
    permission="cancel_instance",
    fits=live,
    run=_cancel,
    follows=after_a_cancellation,
    done=lambda count: in_words(
        count, "%(count)d instance was cancelled.", "%(count)d instances were cancelled."
    ),
    none_fits=_("Only instances that have not ended can be cancelled."),
    log_message="Cancelled.",
    columns=COLUMNS,
    asks_reason=True,
    asks_cascade=True,
    batch=BATCH,
)


# Undo on


def stopped(instances: Any) -> Any:
    """Those whose undoing has stopped at a command that failed."""
    failed = Delivery.objects.filter(
        sender_instance_id=OuterRef("pk"), undoes=True, status=Status.FAILED
    )
    return instances.filter(Exists(failed), lifecycle=Lifecycle.FAILED)


def _continue(instances: Any, answers: Answers, limit: int, on_batch: OnBatch) -> int:
    continued = [
        instance
        for instance in stopped(instances).order_by("pk")[:limit]
        if replaying.continue_compensation(instance)
    ]
    on_batch(continued)
    return len(continued)


def after_continuing(preview: Preview) -> Iterable[str]:
    yield gettext("The undo command at which the undoing has stopped is handled again.")
    yield gettext(
        "Once it is handled, the next one leaves, the newest first; after the last, the instance "
        "ends as compensated. If it fails again, the undoing stops again."
    )
    yield gettext(
        "If it can never succeed, see to it by hand and skip that delivery: the undoing then goes "
        "on after it."
    )


CONTINUE = Act(
    name="continue_compensation",
    title=_("Continue the undoing"),
    permission="compensate_instance",
    fits=stopped,
    run=_continue,
    follows=after_continuing,
    done=lambda count: in_words(
        count,
        "The undoing of %(count)d instance goes on.",
        "The undoing of %(count)d instances goes on.",
    ),
    none_fits=_("Only instances whose undoing has stopped can go on with it."),
    log_message="Continued the undoing.",
    columns=COLUMNS,
    batch=BATCH,
)

ACTS = (CONTINUE, CANCEL)
