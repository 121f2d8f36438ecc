"""The page of what failed alike, and the replay of such a group after a page that explains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_workflows import failures, masking
from django_workflows.admin.actions import Preview, may, respond
from django_workflows.admin.delivery_acts import REPLAY
from django_workflows.admin.display import change_url, list_url, sees_all
from django_workflows.admin.pages import context_of, page_url
from django_workflows.failures import Group, group_of
from django_workflows.models import Delivery


@dataclass(frozen=True)
class Row:
    """A group as the page shows it."""

    group: Group
    error: str
    example_url: str
    list_url: str
    replay_url: str


def groups_page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """All groups of failed deliveries, the largest first."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    found = failures.failed_groups()
    context = context_of(
        model_admin,
        request,
        title=_("Failed deliveries, by handler and error"),
        found=found,
        rows=[row_of(model_admin, request, group) for group in found],
        can_replay=may(request, REPLAY.permission),
    )
    return TemplateResponse(request, "admin/django_workflows/failed_groups.html", context)


def row_of(model_admin: Any, request: HttpRequest, group: Group) -> Row:
    site = model_admin.admin_site
    named = urlencode({"handler": group.handler, "error_class": group.error_class})
    return Row(
        group,
        error_of(request, group.example),
        change_url(site, Delivery, group.example.pk),
        f"{list_url(site, Delivery)}?status__exact=failed&created=any&{named}",
        f"{page_url(site, 'replay_group')}?{named}",
    )


def error_of(request: HttpRequest, example: Delivery) -> str:
    """The error, without what the viewer may not see."""
    text = example.error or example.reason
    if not sees_all(request):
        text = masking.in_brief(example, text)
    return Truncator(text).chars(300)


def replay_page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """What a replay of the group would do; and, once confirmed, the replay, part by part."""
    if not (model_admin.has_view_permission(request) and may(request, REPLAY.permission)):
        raise PermissionDenied
    handler, error_class = request.GET.get("handler", ""), request.GET.get("error_class", "")

    def follows(preview: Preview) -> Iterable[str]:
        yield gettext("The last error of each was %(error)s.") % {"error": error_class or "-"}
        yield from REPLAY.follows(preview)
        yield gettext("What still fails is back in this group.")

    act = dataclasses.replace(
        REPLAY,
        follows=follows,
        none_fits=_("Nothing of this group has failed any more: it was replayed, or deleted."),
        back_url=page_url(model_admin.admin_site, "failed_groups"),
    )
    return respond(model_admin, request, group_of(handler, error_class), act)
