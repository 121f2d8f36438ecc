"""What a person can do to deliveries and instances: asked first, then done in parts, and logged.

Each act calls the function that code and commands call. What is to be done to many rows is done
in several requests: each does what it can in a few seconds and shows how far it is, and stops for
good when its page is left. Rows that fit only since the confirmation are left alone, so a part
that is sent twice, and a row that fails again at once, do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import router, transaction
from django.db.models import Count, Exists, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.text import capfirst
from django.utils.translation import gettext, ngettext

from django_workflows import clock, outbox
from django_workflows.admin.display import change_url, list_url
from django_workflows.admin.pages import context_of
from django_workflows.batching import OnBatch
from django_workflows.errors import WorkflowsError
from django_workflows.models import Delivery

#: For how long one request goes on.
SECONDS_PER_PART = 2.0
#: Rows of one transaction.
BATCH = 500
#: Rows that are counted before a confirmation.
COUNTED = 100_000
#: Rows that are shown one by one before a confirmation.
LISTED = 10
#: What a page of ours adds to the form that it repeats.
OWN_FIELDS = ("csrfmiddlewaretoken", "confirmed", "after", "done", "in_all", "reason", "cascade")


@dataclass(frozen=True)
class Answers:
    """What was asked for with the confirmation."""

    who: str = ""
    reason: str = ""
    cascade: bool = False


@dataclass
class Preview:
    """What an act would be done to."""

    count: int = 0
    has_more: bool = False
    #: Of how many rows each: the columns, then the number.
    groups: list[tuple[Any, ...]] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    left_alone: int = 0


@dataclass(frozen=True)
class Act:
    """Something that is done to rows once it is confirmed."""

    name: str
    title: Any
    #: The codename of the permission, of deliveries.
    permission: str
    #: Those of the rows that it can be done to.
    fits: Callable[[Any], Any]
    #: Does it to at most so many rows, and reports each batch.
    run: Callable[[Any, Answers, int, OnBatch], int]
    #: What will happen, in sentences.
    follows: Callable[[Preview], Iterable[str]]
    #: "1 delivery will be handled again."
    done: Callable[[int], str]
    none_fits: Any
    log_message: str
    columns: tuple[str, ...]
    asks_reason: bool = False
    needs_reason: bool = False
    asks_cascade: bool = False
    batch: int = BATCH
    #: Where it leads in the end, if not to the list.
    back_url: str = ""


@dataclass
class Progress:
    """How far an act has come; it travels in the form from part to part."""

    confirmed: datetime | None = None
    after: UUID | None = None
    done: int = 0
    in_all: int = 0


def respond(
    model_admin: Any, request: HttpRequest, queryset: QuerySet[Any], act: Act
) -> HttpResponse:
    """The answer to an admin action: the confirmation, the next part, or back with a message."""
    queryset = queryset.using(router.db_for_write(queryset.model))
    answers, progress = answers_in(request), progress_in(request)
    is_complete = bool(answers.reason) or not act.needs_reason
    if progress.confirmed is None or not is_complete:
        return confirmation(model_admin, request, queryset, act, progress.confirmed is not None)
    try:
        is_finished = next_part(request, scope_of(queryset, progress), act, answers, progress)
    except WorkflowsError as error:
        model_admin.message_user(request, str(error), messages.ERROR)
        is_finished = True
    if not is_finished:
        return progress_page(model_admin, request, act, progress)
    level = messages.SUCCESS if progress.done else messages.WARNING
    text = act.done(progress.done) if progress.done else str(act.none_fits)
    model_admin.message_user(request, text, level)
    return HttpResponseRedirect(url_to_go_back_to(model_admin, request, act))


# What is asked


def confirmation(
    model_admin: Any, request: HttpRequest, queryset: QuerySet[Any], act: Act, lacks_reason: bool
) -> HttpResponse:
    """The page that says what will happen."""
    preview = preview_of(request, queryset, act)
    back_url = url_to_go_back_to(model_admin, request, act)
    if not preview.count:
        model_admin.message_user(request, str(act.none_fits), messages.WARNING)
        return HttpResponseRedirect(back_url)
    context = context_of(
        model_admin,
        request,
        title=act.title,
        act=act,
        preview=preview,
        follows=list(act.follows(preview)),
        rows=[model_admin.in_brief(request, row) for row in preview.rows],
        lacks_reason=lacks_reason,
        confirmed=clock.read(outbox.database()).isoformat(),
        carried=carried(request),
        parent=capfirst(model_admin.opts.verbose_name_plural),
        parent_url=list_url(model_admin.admin_site, model_admin.model),
        back_url=back_url,
    )
    return TemplateResponse(request, "admin/django_workflows/confirm.html", context)


def preview_of(request: HttpRequest, queryset: QuerySet[Any], act: Act) -> Preview:
    found = act.fits(queryset).order_by()
    some = queryset.model._base_manager.using(queryset.db).filter(
        pk__in=found.values("pk")[: COUNTED + 1]
    )
    counted = some.order_by().values_list(*act.columns).annotate(count=Count("pk"))
    groups = sorted(counted, key=lambda row: (-row[-1], *map(str, row[:-1])))
    count = sum(row[-1] for row in groups)
    preview = Preview(min(count, COUNTED), count > COUNTED, groups)
    if count <= LISTED:
        preview.rows = list(act.fits(queryset).order_by("pk"))
    if request.POST.get("select_across") != "1":
        preview.left_alone = max(len(request.POST.getlist(ACTION_CHECKBOX_NAME)) - count, 0)
    return preview


def carried(request: HttpRequest) -> list[tuple[str, str]]:
    """What chose the rows, to be sent again with the confirmation and with every part."""
    return [
        (name, value)
        for name, values in request.POST.lists()
        if name not in OWN_FIELDS
        for value in values
    ]


def url_to_go_back_to(model_admin: Any, request: HttpRequest, act: Act) -> str:
    """The page of the one row whose button it was, else where the action was chosen."""
    if act.back_url:
        return act.back_url
    if request.POST.get("row"):
        return change_url(model_admin.admin_site, model_admin.model, request.POST["row"])
    return request.get_full_path()


# What is done


def answers_in(request: HttpRequest) -> Answers:
    user: Any = request.user
    return Answers(
        who=user.get_username(),
        reason=request.POST.get("reason", "").strip().replace("\x00", ""),
        cascade=bool(request.POST.get("cascade")),
    )


def progress_in(request: HttpRequest) -> Progress:
    """What the form says; what nobody can have sent by a page of ours counts as unconfirmed."""
    sent = request.POST
    try:
        confirmed = datetime.fromisoformat(sent["confirmed"]) if "confirmed" in sent else None
        return Progress(
            confirmed=confirmed and confirmed.astimezone(UTC),
            after=UUID(sent["after"]) if sent.get("after") else None,
            done=int(sent.get("done") or 0),
            in_all=int(sent.get("in_all") or 0),
        )
    except (ValueError, OverflowError):
        return Progress()


def scope_of(queryset: QuerySet[Any], progress: Progress) -> QuerySet[Any]:
    """What there was when it was confirmed, and has not been seen to since."""
    if progress.after:
        queryset = queryset.filter(pk__gt=progress.after)
    if queryset.model is not Delivery:
        return queryset
    unended = Q(ended_at__isnull=True, created_at__lte=progress.confirmed)
    return queryset.filter(Q(ended_at__lte=progress.confirmed) | unended)


def next_part(
    request: HttpRequest, scope: QuerySet[Any], act: Act, answers: Answers, progress: Progress
) -> bool:
    """Go on for a few seconds; whether that was all. Each batch commits with its log entries."""
    deadline = time.monotonic() + SECONDS_PER_PART
    while True:
        changed: list[Any] = []
        with transaction.atomic(using=router.db_for_write(Delivery)):
            act.run(scope, answers, act.batch, changed.extend)
            log(request, act, answers, changed)
        progress.done += len(changed)
        if len(changed) < act.batch:
            return True
        progress.after = max(row.pk for row in changed)
        scope = scope.filter(pk__gt=progress.after)
        if time.monotonic() >= deadline:
            return not act.fits(scope).order_by().exists()


def log(request: HttpRequest, act: Act, answers: Answers, rows: Sequence[Any]) -> None:
    user_id: Any = request.user.pk
    if rows:
        LogEntry.objects.log_actions(
            user_id=user_id,
            queryset=rows,
            action_flag=CHANGE,
            change_message=gettext(act.log_message)
            + (f" {answers.reason}" if answers.reason else ""),
        )


def progress_page(
    model_admin: Any, request: HttpRequest, act: Act, progress: Progress
) -> HttpResponse:
    """How far it is, and a form for the next part, which a script of ours submits."""
    own = {
        "confirmed": progress.confirmed.isoformat() if progress.confirmed else "",
        "after": progress.after,
        "done": progress.done,
        "in_all": progress.in_all,
        "reason": request.POST.get("reason", ""),
        "cascade": request.POST.get("cascade", ""),
    }
    context = context_of(
        model_admin,
        request,
        title=act.title,
        progress=progress,
        carried=[*carried(request), *own.items()],
        parent=capfirst(model_admin.opts.verbose_name_plural),
        parent_url=list_url(model_admin.admin_site, model_admin.model),
        back_url=url_to_go_back_to(model_admin, request, act),
    )
    return TemplateResponse(request, "admin/django_workflows/progress.html", context)


# The buttons of one row


def buttons_for(
    model_admin: Any, request: HttpRequest, row: Any, acts: Iterable[Act]
) -> list[dict[str, Any]]:
    """What can be done to this row, by this user; in one query, by its primary key."""
    acts = [act for act in acts if may(request, act.permission)]
    model = model_admin.model
    own = model._base_manager.using(router.db_for_write(model)).filter(pk=row.pk)
    asked = {act.name: Exists(act.fits(own).order_by()) for act in acts}
    answer = own.order_by().values(**asked).first() if acts else None
    return [{"name": act.name, "title": act.title} for act in acts if answer and answer[act.name]]


def may(request: HttpRequest, permission: str) -> bool:
    return request.user.has_perm(f"{Delivery._meta.app_label}.{permission}")


def in_words(count: int, one: str, many: str) -> str:
    return ngettext(one, many, count) % {"count": count}
