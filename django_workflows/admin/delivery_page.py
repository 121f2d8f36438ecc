"""The page of one delivery: what can be done, what caused it, what it caused, how its runs went."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib.admin import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_lazy as _

from django_workflows import masking, registry
from django_workflows.admin.actions import buttons_for, may
from django_workflows.admin.delivery_acts import ACTS
from django_workflows.admin.display import (
    badge,
    change_url,
    instance_url,
    list_url,
    printable,
    sees_all,
)
from django_workflows.declarations import WorkflowDefinition
from django_workflows.models import Delivery, Status
from django_workflows.replaying import can_be_replayed
from django_workflows.timeline import WIDE

#: Deliveries in each of the lists.
LISTED = 20
#: Attempts that are shown, the newest.
ATTEMPTS = 20
#: How far the clocks of two machines may be apart.
SKEW = timedelta(seconds=10)


def context_of(model_admin: Any, request: HttpRequest, delivery: Delivery) -> dict[str, Any]:
    site = model_admin.admin_site
    see = sees_all(request)

    def lines(rows: Iterable[Delivery]) -> list[dict[str, Any]]:
        return [line_of(site, row, sees_all=see) for row in rows]

    buttons = buttons_for(model_admin, request, delivery, ACTS)
    if may(request, "edit_delivery") and can_be_replayed(delivery):
        name = "admin:django_workflows_edit_body"
        url = reverse(name, args=[delivery.pk], current_app=site.name)
        buttons.insert(1, {"url": url, "title": EDIT})
    return {
        "buttons": buttons,
        "act_url": list_url(site, Delivery),
        "attempts_made": attempts_of(delivery),
        "cause": lines(cause_of(delivery)),
        "effects": lines(effects_of(delivery)[:LISTED]),
        "copies": lines(copies_of(delivery)[:LISTED]),
        "listed": LISTED,
    }


def cause_of(delivery: Delivery) -> list[Delivery]:
    """What was being handled when this was sent; by the index of messages."""
    if delivery.causation_id is None:
        return []
    found = _brief().filter(message_id=delivery.causation_id)
    by = registry.current().recipient(delivery.sender)
    names = (by.name, *by.aliases) if by else (delivery.sender,)
    return list(found.filter(handler__in=names).order_by("pk")[:LISTED])


def copies_of(delivery: Delivery) -> QuerySet[Delivery]:
    """The same message on its way to others; by the index of messages."""
    return _brief().filter(message_id=delivery.message_id).exclude(pk=delivery.pk).order_by("pk")


def effects_of(delivery: Delivery) -> QuerySet[Delivery]:
    """What was sent while this was handled.

    For an instance by the index of what it sent; for a handler by the primary key, which has the
    time in it: nothing was sent by it outside of the run that committed.
    """
    found = _brief().filter(causation_id=delivery.message_id).order_by("pk")
    if delivery.instance_id is not None and _is_workflow(delivery.handler):
        return found.filter(sender_instance_id=delivery.instance_id)
    if delivery.started_at is None or delivery.ended_at is None:
        return found.none()
    first, last = delivery.started_at - SKEW, delivery.ended_at + SKEW
    bounds = Q(pk__gte=first_id_at(first)) & Q(pk__lt=first_id_at(last))
    return found.filter(bounds, sender=delivery.handler)


def first_id_at(moment: Any) -> UUID:
    """The smallest UUIDv7 of this moment."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)


def attempts_of(delivery: Delivery) -> list[dict[str, Any]]:
    """The failed attempts, the newest first; counts begin anew with a replay."""
    return [
        {
            "attempt": failure.get("attempt", "?"),
            "at": parsed(failure.get("at")),
            "error": printable(str(failure.get("error", ""))),
        }
        for failure in reversed(delivery.failures[-ATTEMPTS:])
        if isinstance(failure, dict)
    ]


def parsed(text: Any) -> Any:
    try:
        return parse_datetime(str(text)) or str(text)
    except ValueError:
        return str(text)


def line_of(site: AdminSite, delivery: Delivery, *, sees_all: bool) -> dict[str, Any]:
    """A delivery on one line."""
    about = delivery.error if delivery.status == Status.FAILED else delivery.reason
    return {
        "delivery": delivery,
        "name": delivery.message_name,
        "handler": delivery.handler,
        "url": change_url(site, Delivery, delivery.pk) if site.is_registered(Delivery) else "",
        "badge": badge(delivery.status, str(Status(delivery.status).label)),
        "about": about if sees_all else masking.in_brief(delivery, about),
        "instance_url": instance_url(site, delivery.handler, delivery.instance_id),
    }


def _is_workflow(name: str) -> bool:
    return isinstance(registry.current().recipient(name), WorkflowDefinition)


def _brief() -> QuerySet[Delivery]:
    return Delivery.objects.defer(*WIDE, "failures", "changes")


EDIT = _("Edit the body and replay")
