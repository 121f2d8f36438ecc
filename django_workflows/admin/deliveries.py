"""The admin of deliveries: what waits, what failed and why, and its replay."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from django_workflows import masking
from django_workflows.admin import delivery_acts, delivery_page
from django_workflows.admin.actions import may, respond
from django_workflows.admin.display import (
    as_block,
    as_json,
    as_text,
    badge,
    instance_link,
    list_url,
    sees_all,
    shown_time,
)
from django_workflows.admin.filters import (
    CreatedFilter,
    ErrorClassFilter,
    HandlerFilter,
    MessageFilter,
    StatusFilter,
)
from django_workflows.admin.lists import ReadOnlyAdmin
from django_workflows.admin.urls import own_urls
from django_workflows.models import Delivery, Status

#: How far the clocks of two machines may be apart.
SKEW = timedelta(hours=1)


class DeliveryAdmin(ReadOnlyAdmin):
    """Shows deliveries, and offers what can be done to them, by a permission for each."""

    change_form_template: ClassVar[str] = "admin/django_workflows/delivery.html"
    actions = tuple(act.name for act in delivery_acts.ACTS)
    list_display = (
        "message_name",
        "handler",
        "status_badge",
        "why",
        "attempts",
        "losses",
        "created",
        "due",
    )
    list_filter: ClassVar[Any] = (
        ("status", StatusFilter),
        CreatedFilter,
        HandlerFilter,
        ErrorClassFilter,
        MessageFilter,
    )
    search_fields = ("id",)
    search_help_text = _(
        "The whole id of a delivery, a message, an instance, or a conversation (correlation id)"
    )
    fieldsets = (
        (None, {"fields": ("status_badge", "reason_block", "error_block", "traceback_block")}),
        (
            _("Message"),
            {
                "fields": (
                    "message_name",
                    "body_block",
                    "original_block",
                    "attributes_block",
                    "sticky_block",
                )
            },
        ),
        (
            _("Handling"),
            {
                "fields": (
                    ("handler", "step", "version"),
                    "instance",
                    "changes_block",
                    ("attempts", "losses", "conflicts", "claims"),
                    ("created", "due", "started", "ended", "relayed"),
                )
            },
        ),
        (
            _("Origin"),
            {
                "fields": (
                    ("sender", "sender_step"),
                    "sender_instance",
                    "id",
                    "message_id",
                    "correlation",
                    "causation",
                    ("queue", "part"),
                )
            },
        ),
    )

    created = shown_time("created_at", _("created at"))
    due = shown_time("due_at", _("due at"))
    started = shown_time("started_at", _("started at"))
    ended = shown_time("ended_at", _("ended at"))
    relayed = shown_time("relay_at", _("relayed next at"))

    # The app's own pages

    def get_urls(self) -> list[Any]:
        return [*own_urls(self), *super().get_urls()]

    # The list

    def wide_fields(self) -> Iterable[str]:
        return (
            "body",
            "original_body",
            "attributes",
            "sticky_attributes",
            "workflow_ids",
            "failures",
            "traceback",
            "changes",
        )

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """The filters and nothing else: no other column has an index."""
        return lookup in ("status__exact", "created", "handler", "error_class", "message")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Rows by a whole id; each of these is found by an index."""
        if not search_term.strip():
            return queryset, False
        try:
            wanted = UUID(search_term.strip())
        except ValueError:
            return queryset.none(), False
        found = Q(pk=wanted) | Q(message_id=wanted) | Q(instance_id=wanted)
        if wanted.version == 7:
            # A conversation's id is its first message's, so nothing of it is older.
            found |= Q(correlation_id=wanted, pk__gte=_slightly_before(wanted))
        return queryset.filter(found), False

    def mask(self, request: HttpRequest, row: Any) -> None:
        if not sees_all(request):
            row.error = masking.in_brief(row, row.error)
            row.reason = masking.in_brief(row, row.reason)

    @admin.display(description=_("status"))
    def status_badge(self, delivery: Delivery) -> str:
        return badge(delivery.status, str(Status(delivery.status).label))

    @admin.display(description=_("error or reason"))
    def why(self, delivery: Delivery) -> str:
        ended_well = delivery.status == Status.HANDLED
        return Truncator(delivery.reason or ("" if ended_well else delivery.error)).chars(100)

    # One delivery

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Without the fields that have nothing to show."""
        if obj is None:
            return super().get_fieldsets(request, obj)
        found = []
        for title, options in super().get_fieldsets(request, obj):
            rows = [self._filled(obj, row) for row in options["fields"]]
            found.append((title, {**options, "fields": [row for row in rows if row]}))
        return found

    def _filled(self, delivery: Delivery, row: Any) -> Any:
        """The fields of one line that are not empty."""
        names = (row,) if isinstance(row, str) else row
        return tuple(name for name in names if self._value(delivery, name) not in (None, ""))

    def _value(self, delivery: Delivery, name: str) -> Any:
        own = getattr(self, name, None)
        return own(delivery) if callable(own) else getattr(delivery, name)

    @admin.display(description=_("reason"))
    def reason_block(self, delivery: Delivery) -> str:
        return delivery.reason if delivery.reason != delivery.error else ""

    @admin.display(description=_("last error"))
    def error_block(self, delivery: Delivery) -> str:
        return as_block(delivery.error)

    @admin.display(description=_("body"))
    def body_block(self, delivery: Delivery) -> str:
        return as_block(as_text(delivery.body))

    @admin.display(description=_("body as it was sent"))
    def original_block(self, delivery: Delivery) -> str:
        return as_block(as_text(delivery.original_body))

    @admin.display(description=_("attributes"))
    def attributes_block(self, delivery: Delivery) -> str:
        return as_block(as_json(delivery.attributes)) if delivery.attributes else ""

    @admin.display(description=_("sticky attributes"))
    def sticky_block(self, delivery: Delivery) -> str:
        return as_block(as_json(delivery.sticky_attributes)) if delivery.sticky_attributes else ""

    @admin.display(description=_("changes"))
    def changes_block(self, delivery: Delivery) -> str:
        return as_block(as_json(delivery.changes)) if delivery.changes else ""

    @admin.display(description=_("last traceback"))
    def traceback_block(self, delivery: Delivery) -> str:
        return as_block(delivery.traceback)

    @admin.display(description=_("instance"))
    def instance(self, delivery: Delivery) -> str:
        return instance_link(self.admin_site, delivery.handler, delivery.instance_id)

    @admin.display(description=_("sender's instance"))
    def sender_instance(self, delivery: Delivery) -> str:
        return instance_link(self.admin_site, delivery.sender, delivery.sender_instance_id)

    @admin.display(description=_("correlation id"))
    def correlation(self, delivery: Delivery) -> str:
        return self._search_link(delivery.correlation_id)

    @admin.display(description=_("causation id"))
    def causation(self, delivery: Delivery) -> str:
        return self._search_link(delivery.causation_id) if delivery.causation_id else ""

    def _search_link(self, wanted: UUID) -> str:
        url = list_url(self.admin_site, Delivery)
        return format_html('<a href="{}?q={}">{}</a>', url, wanted, wanted)

    # What can be done by hand

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return may(request, "replay_delivery")

    def has_edit_permission(self, request: HttpRequest) -> bool:
        return may(request, "edit_delivery")

    def has_skip_permission(self, request: HttpRequest) -> bool:
        return may(request, "skip_delivery")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return may(request, "cancel_delivery")

    def has_reschedule_permission(self, request: HttpRequest) -> bool:
        return may(request, "reschedule_delivery")

    @admin.action(permissions=["replay"], description=_("Replay selected deliveries"))
    def replay_selected(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> HttpResponse:
        return respond(self, request, queryset, delivery_acts.REPLAY)

    @admin.action(permissions=["skip"], description=_("Skip selected deliveries: handled by hand"))
    def skip_selected(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> HttpResponse:
        return respond(self, request, queryset, delivery_acts.SKIP)

    @admin.action(permissions=["cancel"], description=_("Cancel selected deliveries"))
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> HttpResponse:
        return respond(self, request, queryset, delivery_acts.CANCEL)

    @admin.action(permissions=["reschedule"], description=_("Make selected deliveries due now"))
    def make_due_selected(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> HttpResponse:
        return respond(self, request, queryset, delivery_acts.MAKE_DUE)

    def in_brief(self, request: HttpRequest, delivery: Delivery) -> dict[str, Any]:
        """A delivery on one line, for pages that list some."""
        return delivery_page.line_of(self.admin_site, delivery, sees_all=sees_all(request))

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        delivery = kwargs.get("obj")
        if delivery is not None:
            context.update(delivery_page.context_of(self, request, delivery))
        return super().render_change_form(request, context, *args, **kwargs)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """As the viewer may see it: a copy with what is sensitive masked, or the row itself."""
        delivery = super().get_object(request, object_id, from_field)
        return delivery if delivery is None or sees_all(request) else masking.masked(delivery)


def _slightly_before(wanted: UUID) -> UUID:
    """The smallest UUIDv7 of an hour before this one."""
    milliseconds = (wanted.int >> 80) - int(SKEW.total_seconds() * 1000)
    return UUID(int=max(milliseconds, 0) << 80)
