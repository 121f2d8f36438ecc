"""The page of an instance: what it waits for, what has happened to it, whom it is related to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_workflows import masking
from django_workflows.admin.actions import buttons_for
from django_workflows.admin.delivery_page import attempts_of, line_of
from django_workflows.admin.display import as_line, badge, instance_url, list_url, sees_all
from django_workflows.admin.instance_acts import ACTS
from django_workflows.declarations import Step
from django_workflows.messages import MASK
from django_workflows.models import Delivery, Lifecycle, Status, WorkflowState
from django_workflows.timeline import (
    CHILDREN,
    Entry,
    JoinState,
    Relative,
    Sent,
    Timeline,
    Waiting,
    conversations_of,
    neighbours_of,
    relatives_of,
    timeline_of,
    waiting_of,
)

#: Of one entry: so many fields, each of so many characters, and so many failed attempts.
FIELDS, FIELD_LENGTH, ATTEMPTS = 12, 120, 5
#: Characters of all details of the timeline on the page; the newest come first.
ALLOWANCE = 120_000
#: About as many as one line about a delivery takes, with its links.
LINE_LENGTH = 600
#: The page of the timeline in the address.
PAGE_VAR = "timeline"

KINDS = {
    "started": _("started it"),
    "handled": _("handled"),
    "arrived": _("arrived for"),
    "by hand": _("handled by hand"),
    "undone": _("undone"),
    "noted": _("noted"),
    **{str(status): status.label for status in Status if status not in ("handled", "noted")},
}


@dataclass
class Line:
    """One thing that the instance waits for, or is held up by."""

    kind: str
    title: Any
    rows: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    others: int = 0


def context_of(model_admin: Any, request: HttpRequest, instance: WorkflowState) -> dict[str, Any]:
    site, see = model_admin.admin_site, sees_all(request)
    timeline = timeline_of(instance, page=page_in(request))
    waiting = waiting_of(instance, timeline)
    relatives = relatives_of(instance)
    known = {relative.id for relative in relatives}
    neighbours = [one for one in neighbours_of(instance, timeline) if one.id not in known]
    children = [one for one in relatives if one.kind == "child"]
    return {
        "headline": headline_of(instance, waiting),
        "lifecycle": badge(instance.lifecycle, str(Lifecycle(instance.lifecycle).label)),
        "lines": lines_of(site, instance, waiting, see),
        "entries": entries_of(site, instance, timeline, see),
        "timeline": timeline,
        "newer_page": timeline.page - 1,
        "older_page": timeline.page + 1,
        "page_var": PAGE_VAR,
        "parents": related(site, [one for one in relatives if one.kind == "parent"]),
        "children": related(site, children[:CHILDREN]),
        "has_more_children": len(children) > CHILDREN,
        "neighbours": related(site, neighbours),
        "conversations": [str(one) for one in conversations_of(timeline)[:5]],
        "deliveries_url": list_url(site, Delivery),
    }


def buttons_of(
    model_admin: Any, request: HttpRequest, instance: WorkflowState
) -> list[dict[str, Any]]:
    return buttons_for(model_admin, request, instance, ACTS)


def page_in(request: HttpRequest) -> int:
    asked = request.GET.get(PAGE_VAR, "1")
    page = int(asked) if asked.isascii() and asked.isdecimal() and len(asked) < 6 else 1
    return max(page, 1)


def headline_of(instance: WorkflowState, waiting: Waiting) -> str:
    """Where it stands, in a sentence."""
    if waiting.undo_failed:
        return gettext("Its undoing has stopped: an undo command has failed.")
    if waiting.failed:
        return gettext("It is held up: something that it needs has failed.")
    if instance.lifecycle == Lifecycle.COMPENSATING:
        return gettext("It is being undone.")
    if not instance.is_live:
        return gettext("It has ended.")
    if any(row.attempts for group in waiting.commands + waiting.incoming for row in group.listed):
        return gettext("Something that it needs has failed, and is tried again.")
    if waiting.commands or waiting.incoming:
        return gettext("It waits for what is on its way.")
    if waiting.unanswered:
        return gettext("What it sent was handled, and nothing has come back.")
    if waiting.timeouts:
        return gettext("It waits for an answer or a timeout.")
    return gettext("It waits for messages from outside.")


# What it waits for

GROUPS = (
    ("failed", "undo_failed", _("The undoing stopped here")),
    ("failed", "failed", _("Failed: this holds it up")),
    ("pending", "incoming", _("On its way to it")),
    ("pending", "commands", _("Sent, not handled yet")),
    ("pending", "timeouts", _("Timeouts")),
    ("ignored", "told", _("Failed, and it was told")),
    ("noted", "noted", _("Noted to undo")),
)


def lines_of(site: AdminSite, instance: WorkflowState, waiting: Waiting, see: bool) -> list[Line]:
    """What it waits for, the most urgent first."""
    found = [
        line_of_groups(site, kind, title, getattr(waiting, name), see)
        for kind, name, title in GROUPS
        if getattr(waiting, name)
    ]
    if waiting.unanswered:
        rows = [line_of(site, sent, sees_all=see) for sent in waiting.unanswered]
        found.append(Line("pending", _("Handled, nothing came back"), rows))
    found += [Line("pending", _("Waits for several"), text=join_text(j)) for j in waiting.joins]
    if waiting.unseen:
        text = "; ".join(map(step_text, waiting.unseen))
        found.append(Line("", _("Steps not reached yet"), text=text))
    return found


def line_of_groups(
    site: AdminSite, kind: str, title: Any, groups: Sequence[Sent], see: bool
) -> Line:
    rows = [line_of(site, row, sees_all=see) for group in groups for row in group.listed]
    return Line(kind, title, rows, others=sum(group.others for group in groups))


def join_text(join: JoinState) -> str:
    named = {"step": join.step.name, "arrived": join.arrived, "needed": join.needed}
    text = gettext("%(step)s: %(arrived)s of %(needed)s have arrived") % {
        **named,
        "needed": "?" if join.needed is None else join.needed,
    }
    if join.missing:
        text += gettext("; missing: %(names)s") % {"names": ", ".join(join.missing)}
    return text


def step_text(step: Step) -> str:
    return f"{step.name} {step.decorator}"


# What has happened


def entries_of(
    site: AdminSite, instance: WorkflowState, timeline: Timeline, see: bool
) -> list[dict[str, Any]]:
    """The entries as they are shown; of details, what the page has room for, newest first."""
    left = ALLOWANCE
    shown = []
    for entry in reversed(timeline.entries):
        row = entry_of(site, instance, entry, see)
        for name in DETAILS:
            if (size := size_of(row[name])) > left:
                row[name], row["is_cut"] = type(row[name])(), True
            else:
                left -= size
        shown.append(row)
    return shown[::-1]


DETAILS = ("error", "reason", "sent", "changes", "traceback", "attempts")


def size_of(detail: Any) -> int:
    """About how many characters it takes on the page."""
    if isinstance(detail, dict):
        return LINE_LENGTH
    return len(detail) if isinstance(detail, str) else 40 + sum(map(size_of, detail))


def entry_of(site: AdminSite, instance: WorkflowState, entry: Entry, see: bool) -> dict[str, Any]:
    delivery: Any = entry.delivery
    hidden = not see and masking.concerns_sensitive(delivery)
    error = delivery.error if see else masking.in_brief(delivery, delivery.error)
    reason = delivery.reason if see else masking.in_brief(delivery, delivery.reason)
    has_ended = delivery.ended_at is not None
    return {
        **line_of(site, delivery, sees_all=see),
        "kind": entry.kind,
        "badge": badge(str(delivery.status), str(KINDS.get(entry.kind, entry.kind))),
        "at": delivery.ended_at or delivery.due_at,
        "has_ended": has_ended,
        "took": took(delivery),
        "from": origin_of(delivery, instance),
        "from_url": instance_url(site, delivery.sender, delivery.sender_instance_id),
        "reason": reason if reason != error else "",
        "error": Truncator(error).chars(1_000),
        "traceback": "" if hidden else delivery.traceback_end,
        "attempts": [
            {**attempt, "error": MASK if hidden else Truncator(attempt["error"]).chars(300)}
            for attempt in attempts_of(delivery)[:ATTEMPTS]
        ],
        "changes": changes_of(delivery, see),
        "sent": [line_of(site, row, sees_all=see) for row in entry.sent.listed],
        "sent_others": entry.sent.others,
        "is_cut": False,
    }


def took(delivery: Delivery) -> str:
    """For how long the run that ended it took."""
    if delivery.started_at is None or delivery.ended_at is None:
        return ""
    seconds = (delivery.ended_at - delivery.started_at).total_seconds()
    return gettext("%(time)s ms") % {"time": round(seconds * 1000)} if 0 <= seconds < 1000 else ""


def origin_of(delivery: Delivery, instance: WorkflowState) -> str:
    """Who sent it."""
    if not delivery.sender:
        return gettext("from outside")
    if delivery.sender_instance_id == instance.pk:
        return gettext("from its own step %(step)s") % {"step": delivery.sender_step}
    return gettext("from %(sender)s") % {"sender": delivery.sender}


def changes_of(delivery: Delivery, see: bool) -> list[tuple[str, str, str]]:
    """The fields that the step changed, from what to what."""
    changes = delivery.changes if see else masking.changes_of(delivery)
    if not isinstance(changes, Mapping):
        return []
    return [(str(name), *pair_of(pair)) for name, pair in list(changes.items())[:FIELDS]]


def pair_of(pair: Any) -> tuple[str, str]:
    before, after = pair if isinstance(pair, list) and len(pair) == 2 else ("", pair)
    return as_line(before, FIELD_LENGTH), as_line(after, FIELD_LENGTH)


# Whom it is related to


def related(site: AdminSite, relatives: Iterable[Relative]) -> list[dict[str, Any]]:
    return [
        {
            "workflow": one.workflow,
            "id": one.id,
            "url": instance_url(site, one.workflow, one.id),
            "badge": badge(one.lifecycle, str(Lifecycle(one.lifecycle).label))
            if one.lifecycle
            else "",
        }
        for one in relatives
    ]
