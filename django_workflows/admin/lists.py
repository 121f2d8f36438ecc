"""Read-only pages over tables of any size: no row is counted, no column sorted without an index."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import Field, Model, Q, QuerySet
from django.http import HttpRequest

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
    _Paginator = Paginator[Any]
else:  # Django's classes are generic for type checkers only
    _ModelAdmin, _Paginator = admin.ModelAdmin, Paginator

#: The last page that can be asked for; the database reads and skips all rows before it.
LAST_PAGE = 10_000


class LookAhead(_Paginator):
    """Counts no rows: it looks whether there is one after the page that is asked for."""

    def __init__(self, *args: Any, page: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.page_asked_for = min(max(page, 1), LAST_PAGE)

    @cached_property
    def count(self) -> int:
        """How many rows there are up to the end of the page, and one if there are more."""
        before = (self.page_asked_for - 1) * self.per_page
        rows: Any = self.object_list
        return before + len(rows.values_list("pk")[before : before + self.per_page + 1])


class PagedList(ChangeList):
    """A list with links to the newer and the older page instead of numbers."""

    model_admin: Any

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.full_result_count = self.result_count  # "n results" is not shown: nobody counted
        first = (self.page_num - 1) * self.list_per_page if self.multi_page else 0
        self.first, self.last = first + 1, first + len(self.result_list)
        for row in self.result_list:
            self.model_admin.mask(request, row)
        self.newer = self._page(self.page_num - 1) if first else None
        self.older = self._page(self.page_num + 1) if self.result_count > self.last else None

    def _page(self, number: int) -> str:
        return self.get_query_string({PAGE_VAR: number})

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Without the columns that are wide and not shown."""
        queryset = super().get_queryset(request, exclude_parameters)
        return queryset.defer(*self.model_admin.wide_fields())

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        if not self.sortable_by:
            self.params.pop(ORDER_VAR, None)
        return list(super().get_ordering(request, queryset))


class ReadOnlyAdmin(_ModelAdmin):
    """Shows rows, newest first by their UUIDv7, and changes none."""

    change_list_template: ClassVar[str] = "admin/django_workflows/change_list.html"
    ordering = ("-pk",)
    sortable_by: ClassVar[Any] = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_max_show_all = 0
    list_per_page = 50  # a row costs more to show than to find
    view_on_site = False

    class Media:
        css: ClassVar[dict[str, Any]] = {"all": ("django_workflows/admin.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def wide_fields(self) -> Iterable[str]:
        """Names of the fields that the list does without."""
        return ()

    def mask(self, request: HttpRequest, row: Any) -> None:
        """Take from a row of the list what the viewer may not see."""

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return PagedList

    def get_paginator(
        self,
        request: HttpRequest,
        queryset: QuerySet[Any],
        per_page: int,
        orphans: int = 0,
        allow_empty_first_page: bool = True,
    ) -> Paginator[Any]:
        asked_for = request.GET.get(PAGE_VAR, "1")
        page = int(asked_for) if asked_for.isascii() and asked_for.isdecimal() else 1
        return LookAhead(queryset, per_page, orphans, allow_empty_first_page, page=page)


def equal_to(fields: Iterable[Field[Any, Any]], term: str) -> Q | None:
    """That one of the fields equals the term; None when none of them can hold it."""
    found: Q | None = None
    for field in fields:
        try:
            value = field.to_python(term)
        except (ValidationError, ValueError):
            continue
        found = Q(**{field.name: value}) | (found or Q())
    return found
