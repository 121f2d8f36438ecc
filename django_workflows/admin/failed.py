"""The page of what failed alike, and the replay of such a group after a page that explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_workflows import conf, failures, masking, registry
from django_workflows.admin.display import change_url, list_url
from django_workflows.admin.pages import context_of, page_url
from django_workflows.declarations import WorkflowDefinition
from django_workflows.failures import Group
from django_workflows.models import Delivery, Status
from django_workflows.replaying import replay

#: Deliveries that one confirmation replays, while somebody waits for the page.
REPLAYED_AT_ONCE = 10_000


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
        can_replay=model_admin.has_replay_permission(request),
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
    if not request.user.has_perm(f"{Delivery._meta.app_label}.view_sensitive"):
        text = masking.in_brief(example, text)
    return Truncator(text).chars(300)


def replay_page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """What a replay of the group would do; and, once confirmed, the replay."""
    if not (
        model_admin.has_view_permission(request) and model_admin.has_replay_permission(request)
    ):
        raise PermissionDenied
    asked = request.POST if request.method == "POST" else request.GET
    handler, error_class = asked.get("handler", ""), asked.get("error_class", "")
    group = failures.group_of(handler, error_class)
    if request.method == "POST":
        if until := _a_uuid(asked.get("until", "")):
            replay_group(request, group.filter(pk__lte=until))
        return HttpResponseRedirect(page_url(model_admin.admin_site, "failed_groups"))
    rows = group.order_by("pk").values_list("pk", "message_name", "undoes")
    found = list(rows[: REPLAYED_AT_ONCE + 1])
    replayed = found[:REPLAYED_AT_ONCE]
    context = context_of(
        model_admin,
        request,
        title=_("Replay a group of failed deliveries"),
        handler=handler,
        error_class=error_class,
        count=len(replayed),
        has_more=len(found) > len(replayed),
        until=replayed[-1][0] if replayed else "",
        by_message=sorted(Counter(name for _pk, name, _undoes in replayed).items()),
        undoing=sum(undoes for _pk, _name, undoes in replayed),
        kind=kind_of(handler),
        relay_seconds=conf.current().RELAY_EVERY.total_seconds(),
        parent=_("Failed deliveries"),
        parent_url=page_url(model_admin.admin_site, "failed_groups"),
    )
    return TemplateResponse(request, "admin/django_workflows/replay_group.html", context)


def kind_of(handler: str) -> str:
    """What handles the group: a workflow, a handler, or nothing that is declared any more."""
    recipient = registry.current().recipient(handler)
    if recipient is None:
        return ""
    return "workflow" if isinstance(recipient, WorkflowDefinition) else "handler"


def replay_group(request: HttpRequest, group: Any) -> None:
    """Replay, leave an entry in the log for each delivery, and tell how many there were."""
    user_id: Any = request.user.pk

    def log(batch: Sequence[Delivery]) -> None:
        LogEntry.objects.log_actions(
            user_id=user_id,
            queryset=batch,
            action_flag=CHANGE,
            change_message=gettext("Replayed."),
        )

    with transaction.atomic(using=router.db_for_write(Delivery)):
        count = replay(group, limit=REPLAYED_AT_ONCE, on_batch=log)
    if not count:
        text = gettext("None of them has failed any more: somebody was faster.")
        messages.warning(request, text)
        return
    text = ngettext(
        "%(count)d delivery will be handled again.",
        "%(count)d deliveries will be handled again.",
        count,
    )
    messages.success(request, text % {"count": count})
    if count == REPLAYED_AT_ONCE and group.filter(status=Status.FAILED).exists():
        messages.warning(request, gettext("There are more in the group: replay it again."))


def _a_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
