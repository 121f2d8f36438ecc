"""Replay one delivery with another body: edited, checked, shown next to the old one, confirmed."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_workflows import masking
from django_workflows.admin.actions import may
from django_workflows.admin.delivery_acts import REPLAY
from django_workflows.admin.display import as_text, change_url, sees_all
from django_workflows.admin.pages import context_of
from django_workflows.errors import WorkflowsError
from django_workflows.models import Delivery
from django_workflows.replaying import can_be_replayed, edited, replay_edited


def edit_page(model_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    """The form; what would be stored, once it fits; and, once confirmed, the replay."""
    delivery = the_delivery(model_admin, request, object_id)
    back_url = change_url(model_admin.admin_site, Delivery, delivery.pk)
    if not can_be_replayed(delivery):
        model_admin.message_user(request, str(REPLAY.none_fits), messages.WARNING)
        return HttpResponseRedirect(back_url)
    body = request.POST.get("body", as_text(delivery.body))
    stored, error = "", ""
    if request.method == "POST":
        try:
            stored = edited(delivery, body)
        except WorkflowsError as problem:
            error = str(problem)
    if stored and "confirmed" in request.POST:
        replay_with(model_admin, request, delivery, body)
        return HttpResponseRedirect(back_url)
    context = context_of(
        model_admin,
        request,
        title=_("Replay with an edited body"),
        delivery=delivery,
        body=body,
        old=as_text(delivery.body),
        new=as_text(stored) if stored and "again" not in request.POST else "",
        error=error,
        parent=str(delivery),
        parent_url=back_url,
    )
    return TemplateResponse(request, "admin/django_workflows/edit_body.html", context)


def the_delivery(model_admin: Any, request: HttpRequest, object_id: str) -> Delivery:
    """The delivery, if this user may edit it: for that, everything in it must be seen."""
    try:
        delivery: Delivery | None = (
            model_admin.get_queryset(request).filter(pk=unquote(object_id)).first()
        )
    except (ValidationError, ValueError):
        delivery = None
    if not model_admin.has_view_permission(request) or not may(request, "edit_delivery"):
        raise PermissionDenied
    if delivery is None:
        raise Http404
    if not sees_all(request) and masking.concerns_sensitive(delivery):
        raise PermissionDenied
    return delivery


def replay_with(model_admin: Any, request: HttpRequest, delivery: Delivery, body: str) -> None:
    user_id: Any = request.user.pk
    with transaction.atomic(using=router.db_for_write(Delivery)):
        replayed = replay_edited(delivery.pk, body)
        if replayed:
            LogEntry.objects.log_actions(
                user_id=user_id,
                queryset=[delivery],
                action_flag=CHANGE,
                change_message=gettext("Replayed with an edited body."),
            )
    if replayed:
        text = gettext("It will be handled again, with the edited body.")
        model_admin.message_user(request, text, messages.SUCCESS)
    else:
        text = gettext("It has been replayed meanwhile, and keeps its body.")
        model_admin.message_user(request, text, messages.WARNING)
