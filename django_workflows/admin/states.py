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

from django_workflows import masking
from django_workflows.admin import instance_acts, instance_page
from django_workflows.admin.actions import may, respond
from django_workflows.admin.display import (
    as_block,
    as_json,
    badge,
    change_url,
    instance_link,
    list_url,
    sees_all,
    shown_time,
)
from django_workflows.admin.lists import ReadOnlyAdmin, equal_to
from django_workflows.instances import MANAGED
from django_workflows.models import Delivery, Lifecycle, WorkflowState

Field: TypeAlias = "models.Field[Any, Any]"

#: Fields that are too wide for a list.
WIDE = (models.TextField, models.JSONField, models.BinaryField)
#: Fields that can be searched for a text, given that they have an index.
SEARCHABLE = (models.CharField, models.TextField, models.UUIDField, models.IntegerField)
#: Fields of the state in the list.
FIELDS_SHOWN = 8
#: Characters of a JSON field on it.
LONGEST_JSON = 20_000
#: Fields of the state in one row of its page.
IN_A_ROW = 3


class WorkflowStateAdmin(ReadOnlyAdmin):
    """Shows the instances of one workflow, what became of their messages, and what they wait for.

    It offers to cancel them and to go on undoing, by a permission for each; fields are not changed.
    Extend it and register your class in your app's admin.py; the default is registered only for
    states that have none. `list_display`, `search_fields`, `fieldsets` and the rest are Django's.
    """

    change_form_template: ClassVar[str] = "admin/django_workflows/instance.html"
    actions = tuple(act.name for act in instance_acts.ACTS)
    list_filter: ClassVar[Any] = ("lifecycle",)

    started = shown_time("started_at", _("started at"))
    updated = shown_time("updated_at", _("updated at"))
    ended = shown_time("ended_at", _("ended at"))

    # The list

    def get_list_display(self, request: HttpRequest) -> Any:
        if tuple(self.list_display) != ("__str__",):
            return self._masked(request, self.list_display)
        narrow = [field for field in self._own_fields() if not isinstance(field, WIDE)]
        narrow.sort(
            key=lambda field: isinstance(field, models.UUIDField)
        )  # long, so they come last
        shown = [field.name for field in narrow[:FIELDS_SHOWN]]
        columns = ("id", "lifecycle_badge", *shown, "version", "started", "updated", "ended")
        return self._masked(request, columns)

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
        return self.search_fields or [field.name for field in self._searchable(request)]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """The rows whose id, or another indexed field, is the term; never a part of it."""
        term = search_term.strip()
        if self.search_fields or not term:
            return super().get_search_results(request, queryset, search_term)
        found = equal_to(self._searchable(request), term)
        return (queryset.filter(found) if found else queryset.none()), False

    @property
    def search_help_text(self) -> Any:  # type: ignore[override]
        if self.search_fields:
            return None
        hidden = self.model.sensitive_fields
        shown = [field for field in self._searchable() if field.name not in hidden]
        names = ", ".join(str(field.verbose_name) for field in shown)
        return _("The whole value of one of: %(names)s") % {"names": names}

    def _own_fields(self) -> list[Field]:
        return [f for f in self.opts.concrete_fields if f.name not in MANAGED]

    def _searchable(self, request: HttpRequest | None = None) -> list[Field]:
        """The id, and the fields that a search finds by an index and the viewer may see."""
        indexed = _indexed_fields(self.model)
        if request is not None and not sees_all(request):
            indexed -= set(self.model.sensitive_fields)
        own = [f for f in self._own_fields() if f.name in indexed and isinstance(f, SEARCHABLE)]
        pk: Any = self.opts.pk
        return [pk, *own]

    @admin.display(description=_("lifecycle"))
    def lifecycle_badge(self, instance: WorkflowState) -> str:
        return badge(instance.lifecycle, str(Lifecycle(instance.lifecycle).label))

    # One instance

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        if self.fieldsets or self.fields:
            return [
                (title, {**options, "fields": self._masked(request, options["fields"])})
                for title, options in super().get_fieldsets(request, obj)
            ]
        managed = ["id", ("lifecycle_badge", "version", "started", "updated", "ended")]
        if obj is not None and obj.starter_id is not None:
            managed.append("started_by")
        wide = [f for f in self._own_fields() if isinstance(f, WIDE)]
        narrow = [f.name for f in self._own_fields() if f not in wide]
        own: list[Any] = [tuple(narrow[i : i + IN_A_ROW]) for i in range(0, len(narrow), IN_A_ROW)]
        hidden = () if sees_all(request) else self.model.sensitive_fields
        own += [
            _json_block(f) if isinstance(f, models.JSONField) and f.name not in hidden else f.name
            for f in wide
        ]
        own = self._masked(request, own)
        return ((None, {"fields": own}), (_("Instance"), {"fields": managed}))

    @admin.display(description=_("started by"))
    def started_by(self, instance: WorkflowState) -> str:
        return instance_link(self.admin_site, instance.starter_workflow, instance.starter_id)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        instance = kwargs.get("obj")
        if instance is not None:
            context["buttons"] = instance_page.buttons_of(self, request, instance)
            context["act_url"] = list_url(self.admin_site, self.model)
            if self._shows_deliveries(request):
                context.update(instance_page.context_of(self, request, instance))
        return super().render_change_form(request, context, *args, **kwargs)

    def _shows_deliveries(self, request: HttpRequest) -> bool:
        site = self.admin_site
        return site.is_registered(Delivery) and site.get_model_admin(Delivery).has_view_permission(
            request
        )

    # What can be done by hand

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return may(request, "cancel_instance")

    def has_compensate_permission(self, request: HttpRequest) -> bool:
        return may(request, "compensate_instance")

    @admin.action(permissions=["cancel"], description=_("Cancel selected %(verbose_name_plural)s"))
    def cancel_instances(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return respond(self, request, queryset, instance_acts.CANCEL)

    @admin.action(
        permissions=["compensate"],
        description=_("Continue the undoing of selected %(verbose_name_plural)s"),
    )
    def continue_compensation(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        return respond(self, request, queryset, instance_acts.CONTINUE)

    def in_brief(self, request: HttpRequest, instance: WorkflowState) -> dict[str, Any]:
        """An instance on one line, for pages that list some."""
        return {
            "name": str(instance),
            "url": change_url(self.admin_site, self.model, instance.pk),
            "badge": self.lifecycle_badge(instance),
        }

    # What not everybody may see

    def _masked(self, request: HttpRequest, names: Any) -> Any:
        """The names of fields, with what masks those that this viewer may not see."""
        hidden = () if sees_all(request) else self.model.sensitive_fields
        if not hidden or not isinstance(names, list | tuple):
            return names
        return [
            _masked_field(self.opts.get_field(name))
            if name in hidden
            else self._masked(request, name)
            for name in names
        ]


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


def _masked_field(field: Any) -> Callable[[Any], str]:
    @admin.display(description=capfirst(str(field.verbose_name)))
    def show(instance: Any) -> str:
        value = getattr(instance, field.attname)
        return str(masking.shown_value(instance, field.name, value) or "")

    return show


def _json_block(field: Field) -> Callable[[Any], str]:
    @admin.display(description=capfirst(str(field.verbose_name)))
    def show(instance: Any) -> str:
        return as_block(as_json(getattr(instance, field.attname)), LONGEST_JSON)

    return show
