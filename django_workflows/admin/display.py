"""How values are shown: JSON, status, changes, links. Everything is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator

from django_workflows import registry
from django_workflows.declarations import WorkflowDefinition
from django_workflows.models import Delivery

#: Characters of one value; the rest is in the database.
LONGEST = 100_000


def as_json(value: Any) -> str:
    """The value as indented JSON that can be written to a page, lone surrogates included."""
    return printable(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def printable(text: str) -> str:
    """The text without lone surrogates, which JSON may hold and a page may not."""
    return text.encode(errors="backslashreplace").decode()


def as_text(body: str) -> str:
    """A body as indented JSON; as it is, if it is no JSON."""
    try:
        return as_json(json.loads(body)) if body else ""
    except (ValueError, RecursionError):
        return body


def as_block(text: str, longest: int = LONGEST) -> str:
    """The text as it is, in a block of its own."""
    if not text:
        return ""
    if len(text) > longest:
        text = f"{text[:longest]}\n…"
    return format_html('<pre class="workflows-block">{}</pre>', text)


def shown_time(field: str, label: Any) -> Callable[[Any, Any], str]:
    """A column for a time, to the second."""

    @admin.display(description=label, ordering=field)
    def show(_model_admin: Any, row: Any) -> str:
        value = getattr(row, field)
        return "" if value is None else f"{timezone.localtime(value):%Y-%m-%d %H:%M:%S}"

    return show


def sees_all(request: HttpRequest) -> bool:
    """Whether the viewer may see what is marked as sensitive."""
    return request.user.has_perm(f"{Delivery._meta.app_label}.view_sensitive")


def badge(value: str, label: str) -> SafeString:
    """A status or lifecycle, coloured by its name."""
    return format_html('<span class="workflows-badge workflows-{}">{}</span>', value, label)


def as_line(value: Any, length: int = 60) -> str:
    """The value on one line, no longer than that: text as it is, all else as JSON."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return Truncator(printable(text)[: length * 4]).chars(length)


def link(site: AdminSite, model: type[Model], pk: Any, text: str) -> str:
    """A link to the row's page on this site; the text alone if the site does not have the model."""
    if not site.is_registered(model):
        return text
    return format_html('<a href="{}">{}</a>', change_url(site, model, pk), text)


def change_url(site: AdminSite, model: type[Model], pk: Any) -> str:
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
    return reverse(name, args=(quote(str(pk)),), current_app=site.name)


def list_url(site: AdminSite, model: type[Model]) -> str:
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
    return reverse(name, current_app=site.name)


def instance_link(site: AdminSite, workflow: str, instance_id: UUID | None) -> str:
    """A link to the instance of the workflow of this name, if there is one."""
    if instance_id is None:
        return ""
    definition = registry.current().recipient(workflow)
    if isinstance(definition, WorkflowDefinition):
        return link(site, definition.state, instance_id, str(instance_id))
    return str(instance_id)


def instance_url(site: AdminSite, workflow: str, pk: Any) -> str:
    """The page of an instance on this site, if it has one."""
    definition = registry.current().recipient(workflow)
    if pk is None or not isinstance(definition, WorkflowDefinition):
        return ""
    state = definition.state
    return change_url(site, state, pk) if site.is_registered(state) else ""
