"""How values are shown: JSON, status, changes, links. Everything is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.db.models import Model
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator

from django_workflows import registry
from django_workflows.declarations import WorkflowDefinition

#: Characters of one value; the rest is in the database.
LONGEST = 100_000


def as_json(value: Any) -> str:
    """The value as indented JSON that can be written to a page, lone surrogates included."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()


def as_block(text: str) -> str:
    """The text as it is, in a block of its own."""
    if not text:
        return ""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}\n…"
    return format_html('<pre class="workflows-block">{}</pre>', text)


def failures_as_text(failures: Sequence[Mapping[str, Any]]) -> str:
    """Each failed attempt: which, when, and its error."""
    shown = []
    for failure in failures:
        attempt, at = failure.get("attempt", "?"), str(failure.get("at", ""))[:19]
        shown.append(f"{attempt}. {at.replace('T', ' ')} UTC\n{failure.get('error', '')}")
    return "\n\n".join(shown).encode(errors="backslashreplace").decode()


def shown_time(field: str, label: Any) -> Callable[[Any, Any], str]:
    """A column for a time, to the second."""

    @admin.display(description=label, ordering=field)
    def show(_model_admin: Any, row: Any) -> str:
        value = getattr(row, field)
        return "" if value is None else f"{timezone.localtime(value):%Y-%m-%d %H:%M:%S}"

    return show


def badge(value: str, label: str) -> SafeString:
    """A status or lifecycle, coloured by its name."""
    return format_html('<span class="workflows-badge workflows-{}">{}</span>', value, label)


def changes_in_brief(changes: Mapping[str, Any] | None, length: int = 160) -> str:
    """What a step changed, on one line: `status: placed → paid`."""
    pairs = (f"{field}: {_brief(pair)}" for field, pair in (changes or {}).items())
    return Truncator("; ".join(pairs)).chars(length)


def _brief(pair: Any) -> str:
    if not isinstance(pair, list) or len(pair) != 2:
        return _value(pair)
    return f"{_value(pair[0])} → {_value(pair[1])}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return Truncator(text.encode(errors="backslashreplace").decode()).chars(60)


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
