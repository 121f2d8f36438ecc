"""The overview of all workflows, and the page of one with its process drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_workflows import graph, registry, status
from django_workflows.admin.charts import chart, sparkline
from django_workflows.admin.display import change_url, list_url
from django_workflows.admin.pages import context_of, page_url
from django_workflows.declarations import WorkflowDefinition
from django_workflows.models import Delivery, Lifecycle, Worker, WorkflowState
from django_workflows.status import Figure, Overview, Recipient, Workflow

#: Rows of each table; more make the page too large.
SHOWN = 60


@dataclass(frozen=True)
class Row:
    """A workflow or a handler as the page shows it."""

    name: str
    list_url: str
    deliveries_url: str
    failed_url: str
    graph_url: str
    figures: Recipient
    lifecycles: list[tuple[str, Figure, str]]
    oldest_running: str
    oldest_running_url: str
    oldest_due: str
    minutes: SafeString
    hours: SafeString


def overview_page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """How things stand, for who may see deliveries."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    site = model_admin.admin_site
    found = status.overview()
    seen = [w for w in found.workflows if may_view(site, request, definition_of(w))]
    handlers = [handler for handler in found.handlers if has_anything(handler)]
    context = context_of(
        model_admin,
        request,
        title=_("Overview of workflows"),
        found=found,
        workflows=[workflow_row(site, found, w, i) for i, w in enumerate(seen[:SHOWN])],
        handlers=[row(site, found, h, f"h{i}") for i, h in enumerate(handlers[:SHOWN])],
        workflows_left_out=max(len(seen) - SHOWN, 0),
        handlers_left_out=max(len(handlers) - SHOWN, 0),
        oldest_due=lasting(found.age(found.backlog.oldest_due_at)),
        overdue_after=lasting(status.OVERDUE_AFTER),
        minutes=chart(
            found.minutes, "minutes", gettext("Each of the last minutes"), time_format="%H:%M"
        ),
        hours=chart(
            found.hours, "hours", gettext("Each of the last hours"), time_format="%a %H:%M"
        ),
        last_minute=found.minutes[-2] if len(found.minutes) > 1 else None,
        last_hour=found.hours[-2] if len(found.hours) > 1 else None,
        workers=[(worker, lasting(found.age(worker.seen_at))) for worker in presence(found)],
        failed_url=page_url(site, "failed_groups"),
        deliveries_url=list_url(site, Delivery),
    )
    return TemplateResponse(request, "admin/django_workflows/overview.html", context)


def has_anything(handler: Recipient) -> bool:
    """Whether there is something to say of a handler."""
    backlog = handler.backlog
    figures = (backlog.waiting, backlog.due, backlog.running, backlog.failed)
    bars = (*handler.minutes, *handler.hours)
    return any(f.value for f in figures) or any(b.handled.value or b.failed.value for b in bars)


def presence(found: Overview) -> Sequence[Worker]:
    """The processes that are there, and the last one of those that are gone."""
    lately = {*found.workers_seen_lately, *found.relays_seen_lately}
    here = [worker for worker in found.workers if worker in lately]
    return here[:20] or found.workers[:1]


# Rows


def workflow_row(site: AdminSite, found: Overview, workflow: Workflow, place: int) -> Row:
    definition = definition_of(workflow)
    url = list_url(site, definition.state) if site.is_registered(definition.state) else ""
    lifecycles = [
        (str(lifecycle.value), figure, f"{url}?lifecycle__exact={lifecycle.value}" if url else "")
        for lifecycle, figure in workflow.instances.items()
        if lifecycle in SHOWN_LIFECYCLES
    ]
    return row(
        site,
        found,
        workflow,
        f"w{place}",
        list_url=url,
        lifecycles=lifecycles,
        graph_url=f"{page_url(site, 'graph')}?{urlencode({'workflow': workflow.name})}",
        oldest_running=lasting(found.age(workflow.oldest_running_at)),
        oldest_running_url=change_url(site, definition.state, workflow.oldest_running_id)
        if url and workflow.oldest_running_id
        else "",
    )


SHOWN_LIFECYCLES = (
    Lifecycle.RUNNING,
    Lifecycle.COMPENSATING,
    Lifecycle.FAILED,
    Lifecycle.COMPLETED,
)


def row(site: AdminSite, found: Overview, figures: Recipient, key: str, **own: Any) -> Row:
    deliveries = f"{list_url(site, Delivery)}?{urlencode({'handler': figures.name})}&created=any"
    given: dict[str, Any] = {
        "list_url": "",
        "graph_url": "",
        "lifecycles": [],
        "oldest_running": "",
        "oldest_running_url": "",
        **own,
    }
    return Row(
        name=figures.name,
        deliveries_url=deliveries,
        failed_url=f"{deliveries}&status__exact=failed",
        figures=figures,
        oldest_due=lasting(found.age(figures.backlog.oldest_due_at)),
        minutes=sparkline(figures.minutes, f"{key}-minutes", gettext("The last minutes")),
        hours=sparkline(figures.hours, f"{key}-hours", gettext("The last hours")),
        **given,
    )


def definition_of(workflow: Workflow) -> WorkflowDefinition:
    definition = registry.current().recipient(workflow.name)
    assert isinstance(definition, WorkflowDefinition)  # noqa: S101  the overview lists only these
    return definition


def may_view(site: AdminSite, request: HttpRequest, definition: WorkflowDefinition) -> bool:
    """Whether the viewer may see the workflow's instances, on a site that has them or not."""
    if site.is_registered(definition.state):
        return bool(site.get_model_admin(definition.state).has_view_permission(request))
    opts = definition.state._meta
    return request.user.has_perm(f"{opts.app_label}.{get_permission_codename('view', opts)}")


def lasting(span: timedelta | None) -> str:
    """A span of time in its largest unit, and the next: `3 h 20 min`."""
    if span is None:
        return ""
    seconds = int(span.total_seconds())
    units = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    parts: list[tuple[int, str]] = []
    for size, unit in units:
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append((count, unit))
    shown = parts[:2] or [(0, "s")]
    return " ".join(f"{count} {unit}" for count, unit in shown if count or shown == [(0, "s")])


# One workflow


def graph_page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """The process of one workflow, drawn from what recent deliveries say; or of an instance."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    definition = definition_named(request.GET.get("workflow", ""))
    site = model_admin.admin_site
    if not may_view(site, request, definition):
        raise PermissionDenied
    instance = (
        instance_of(definition, request.GET["instance"]) if "instance" in request.GET else None
    )
    drawn = graph.graph_of(definition, instance)
    is_listed = site.is_registered(definition.state)
    context = context_of(
        model_admin,
        request,
        title=_("Process of %(name)s") % {"name": definition.name},
        parent=_("Overview of workflows"),
        parent_url=page_url(site, "overview"),
        drawing=graph.as_svg(drawn),
        graph=drawn,
        instance=instance,
        instance_url=change_url(site, definition.state, instance.pk)
        if instance and is_listed
        else "",
        instances_url=list_url(site, definition.state) if is_listed else "",
    )
    return TemplateResponse(request, "admin/django_workflows/graph.html", context)


def definition_named(name: str) -> WorkflowDefinition:
    """The workflow of this name, or whose state has it for its label."""
    for definition in registry.current().workflows:
        if name in (*definition.names, definition.state._meta.label):
            return definition
    raise Http404(f"No workflow is named {name!r}.")


def instance_of(definition: WorkflowDefinition, pk: str) -> WorkflowState:
    try:
        found: WorkflowState | None = definition.state._default_manager.filter(pk=pk).first()
    except ValidationError:
        found = None
    if found is None:
        raise Http404(f"{definition.name} has no instance {pk!r}.")
    return found
