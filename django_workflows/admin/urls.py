"""The addresses of the app's own pages, below those of deliveries, on whatever site these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path

from django_workflows.admin.edit_body import edit_page
from django_workflows.admin.failed import groups_page, replay_page
from django_workflows.admin.overview import graph_page, overview_page

Page = Callable[..., HttpResponse]


def own_urls(model_admin: Any) -> list[URLPattern]:
    """For `get_urls` of the admin of deliveries."""

    def at(route: str, page: Page, name: str) -> URLPattern:
        def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
            return page(model_admin, request, **arguments)

        found: URLPattern = path(route, model_admin.admin_site.admin_view(view), name=name)
        return found

    return [
        at("overview/", overview_page, "django_workflows_overview"),
        at("graph/", graph_page, "django_workflows_graph"),
        at("failed/", groups_page, "django_workflows_failed_groups"),
        at("<path:object_id>/edit-body/", edit_page, "django_workflows_edit_body"),
        at("failed/replay/", replay_page, "django_workflows_replay_group"),
    ]
