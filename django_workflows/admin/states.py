"""The admin of a workflow's instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

from django.contrib import admin
from django.db import models
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from django_workflows.admin.display import (
    as_block,
    as_json,
    badge,
    change_url,
    changes_in_brief,
    instance_link,
    list_url,
    shown_time,
)
from django_workflows.admin.lists import ReadOnlyAdmin, equal_to
from django_workflows.instances import MANAGED
from django_workflows.models import Delivery, Lifecycle, Status, WorkflowState

Field: TypeAlias = "models.Field[Any, Any]"

#: Fields that are too wide for a list.
WIDE = (models.TextField, models.JSONField, models.BinaryField)
#: Fields that can be searched for a text, given that they have an index.
SEARCHABLE = (models.CharField, models.TextField, models.UUIDField, models.IntegerField)
#: Deliveries on the page of an instance; the link leads to all.
DELIVERIES_SHOWN = 100
#: Fields of the state in the list.
FIELDS_SHOWN = 8


class WorkflowStateAdmin(ReadOnlyAdmin):
    """Shows the instances of one workflow, and what became of their messages; changes nothing.

    Extend it and register your class in your app's admin.py; the default is registered only for
    states that have none. `list_display`, `search_fields`, `fieldsets` and the rest are Django's.
    """

    change_form_template: ClassVar[str] = "admin/django_workflows/instance.html"
    list_filter: ClassVar[Any] = ("lifecycle",)

    started = shown_time("started_at", _("started at"))
    updated = shown_time("updated_at", _("updated at"))
    ended = shown_time("ended_at", _("ended at"))

    # The list

    def get_list_display(self, request: HttpRequest) -> Any:
        if tuple(self.list_display) != ("__str__",):
            return self.list_display
        narrow = [field for field in self._own_fields() if not isinstance(field, WIDE)]
        narrow.sort(
            key=lambda field: isinstance(field, models.UUIDField)
        )  # long, so they come last
        shown = [field.name for field in narrow[:FIELDS_SHOWN]]
        return ("id", "lifecycle_badge", *shown, "version", "started", "updated", "ended")

    def get_list_select_related(self, request: HttpRequest) -> Any:
        if self.list_select_related:
            return self.list_select_related
        shown = self.get_list_display(request)
        return [f.name for f in self._own_fields() if f.many_to_one and f.name in shown] or False

    def wide_fields(self) -> Iterable[str]:
        if tuple(self.list_display) != ("__str__",):
            return ()
        return [f.name for f in self._own_fields() if isinstance(f, WIDE)]

    def get_search_fields(self, request: HttpRequest) -> Any:
        return self.search_fields or [field.name for field in self._searchable()]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """The rows whose id, or another indexed field, is the term; never a part of it."""
        term = search_term.strip()
        if self.search_fields or not term:
            return super().get_search_results(request, queryset, search_term)
        found = equal_to(self._searchable(), term)
        return (queryset.filter(found) if found else queryset.none()), False

    @property
    def search_help_text(self) -> Any:  # type: ignore[override]
        if self.search_fields:
            return None
        names = ", ".join(str(field.verbose_name) for field in self._searchable())
        return _("The whole value of one of: %(names)s") % {"names": names}

    def _own_fields(self) -> list[Field]:
        return [f for f in self.opts.concrete_fields if f.name not in MANAGED]

    def _searchable(self) -> list[Field]:
        """The id, and the fields that a search finds by an index."""
        indexed = _indexed_fields(self.model)
        own = [f for f in self._own_fields() if f.name in indexed and isinstance(f, SEARCHABLE)]
        pk: Any = self.opts.pk
        return [pk, *own]

    @admin.display(description=_("lifecycle"))
    def lifecycle_badge(self, instance: WorkflowState) -> str:
        return badge(instance.lifecycle, str(Lifecycle(instance.lifecycle).label))

    # One instance

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        if self.fieldsets or self.fields:
            return super().get_fieldsets(request, obj)
        managed = ["id", ("lifecycle_badge", "version"), ("started", "updated", "ended")]
        if obj is not None and obj.starter_id is not None:
            managed.append("started_by")
        own = [
            _json_block(f) if isinstance(f, models.JSONField) else f.name
            for f in self._own_fields()
        ]
        return ((None, {"fields": own}), (_("Instance"), {"fields": managed}))

    @admin.display(description=_("started by"))
    def started_by(self, instance: WorkflowState) -> str:
        return instance_link(self.admin_site, instance.starter_workflow, instance.starter_id)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        instance = kwargs.get("obj")
        if instance is not None and self._shows_deliveries(request):
            context.update(self._deliveries_of(instance))
        return super().render_change_form(request, context, *args, **kwargs)

    def _shows_deliveries(self, request: HttpRequest) -> bool:
        site = self.admin_site
        return site.is_registered(Delivery) and site.get_model_admin(Delivery).has_view_permission(
            request
        )

    def _deliveries_of(self, instance: WorkflowState) -> dict[str, Any]:
        """The newest deliveries that have reached the instance, for the page's timeline."""
        wanted = Delivery.objects.filter(instance_id=instance.pk).order_by("-pk")
        wanted = wanted.only(*_SHOWN_OF_DELIVERIES)
        found = list(wanted[: DELIVERIES_SHOWN + 1])
        return {
            "deliveries": [self._row_of(delivery) for delivery in found[:DELIVERIES_SHOWN]],
            "deliveries_shown": DELIVERIES_SHOWN,
            "has_more_deliveries": len(found) > DELIVERIES_SHOWN,
            "all_deliveries_url": f"{list_url(self.admin_site, Delivery)}?q={instance.pk}",
        }

    def _row_of(self, delivery: Delivery) -> dict[str, Any]:
        return {
            "delivery": delivery,
            "url": change_url(self.admin_site, Delivery, delivery.pk),
            "badge": badge(delivery.status, str(Status(delivery.status).label)),
            "changes": changes_in_brief(delivery.changes) or delivery.reason,
        }


_SHOWN_OF_DELIVERIES = (
    "message_name",
    "handler",
    "step",
    "status",
    "reason",
    "attempts",
    "version",
    "changes",
    "created_at",
    "due_at",
    "ended_at",
)


def _indexed_fields(model: type[models.Model]) -> set[str]:
    """The names of the fields that are unique, or that an index begins with."""
    indexed = {
        f.name for f in model._meta.concrete_fields if f.unique or getattr(f, "db_index", False)
    }
    indexed |= {index.fields[0].lstrip("-") for index in model._meta.indexes if index.fields}
    for constraint in model._meta.constraints:
        if isinstance(constraint, models.UniqueConstraint) and constraint.fields:
            indexed.add(constraint.fields[0])
    return indexed


def _json_block(field: Field) -> Callable[[Any], str]:
    @admin.display(description=capfirst(str(field.verbose_name)))
    def show(instance: Any) -> str:
        return as_block(as_json(getattr(instance, field.attname)))

    return show
