"""Filters of the list of deliveries. Their choices come from what is declared, never from rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from django_workflows import clock, registry
from django_workflows.models import UNENDED, Status

#: Statuses whose rows an index finds, however many others there are.
INDEXED = (Status.FAILED, Status.PENDING, Status.RUNNING)


class StatusFilter(admin.ChoicesFieldListFilter):
    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        if request.GET.get(self.lookup_kwarg) in UNENDED:
            # True of all of them: it lets the index of what is due be used.
            queryset = queryset.filter(relay_at__isnull=False)
        return super().queryset(request, queryset)


class HandlerFilter(admin.SimpleListFilter):
    title = _("handler or workflow")
    parameter_name = "handler"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, Any]]:
        names = sorted(recipient.name for recipient in registry.current().recipients)
        return [(name, name) for name in names]

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        if self.value() is None:
            return None
        recipient = registry.current().recipient(self.value() or "")
        names = (recipient.name, *recipient.aliases) if recipient else (self.value(),)
        return queryset.filter(handler__in=names)


class ErrorClassFilter(admin.SimpleListFilter):
    """Shown where the page of what failed alike leads; of itself it knows no errors."""

    title = _("error")
    parameter_name = "error_class"

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self.asked_for = request.GET.get(self.parameter_name)
        super().__init__(request, *args)

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, Any]]:
        return [] if self.asked_for is None else [(self.asked_for, self.asked_for or "-")]

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        return queryset.filter(error_class=self.asked_for)


class MessageFilter(admin.SimpleListFilter):
    title = _("message")
    parameter_name = "message"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, Any]]:
        return [(name, name) for name in sorted(self._names())]

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        name = self.value()
        if name is None:
            return None
        return queryset.filter(message_name__in=self._names().get(name, (name,)))

    def _names(self) -> dict[str, tuple[str, ...]]:
        """Each message's stored name, and all its names."""
        messages = (m for recipient in registry.current().recipients for m in recipient.messages)
        return {message.stored_name(): message.stored_names() for message in messages}


class CreatedFilter(admin.SimpleListFilter):
    """By the time in the UUIDv7 that is the primary key, so that its index is read.

    A filter that no other index serves is limited to a day until a time is chosen.
    """

    title = _("created")
    parameter_name = "created"
    periods = (
        ("hour", _("Past hour"), timedelta(hours=1)),
        ("day", _("Past day"), timedelta(days=1)),
        ("week", _("Past week"), timedelta(days=7)),
        ("month", _("Past 30 days"), timedelta(days=30)),
    )

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        super().__init__(request, *args)
        status = request.GET.get("status__exact", "")
        indexed = {"handler", "error_class"} if status == Status.FAILED else set()
        names_chosen = ({"handler", "error_class", "message"} - indexed) & set(request.GET)
        needs_limit = names_chosen or (status and status not in INDEXED)
        self.default = "day" if needs_limit and not request.GET.get(SEARCH_VAR) else "any"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, Any]]:
        return [("any", _("Any time")), *((key, title) for key, title, _length in self.periods)]

    def chosen(self) -> str:
        return self.value() or self.default

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        for key, _title, length in self.periods:
            if key == self.chosen():
                return queryset.filter(pk__gte=first_id_after(length))
        return None

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        for key, title in self.lookup_choices:
            yield {
                "selected": key == self.chosen(),
                "query_string": changelist.get_query_string({self.parameter_name: key}),
                "display": title,
            }


def first_id_after(length: timedelta) -> UUID:
    """The smallest UUIDv7 that was made in the past so long."""
    milliseconds = int((clock.local() - length).timestamp() * 1000)
    return UUID(int=milliseconds << 80)
