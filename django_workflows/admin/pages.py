"""What the app's own pages have in common: their place in the admin, on any site."""

from __future__ import annotations

from typing import Any

import django
from django.contrib.admin import AdminSite
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse


def page_url(site: AdminSite, name: str) -> str:
    """The address of one of the app's own pages; empty where the site does not have it."""
    try:
        return reverse(f"admin:django_workflows_{name}", current_app=site.name)
    except NoReverseMatch:
        return ""


def context_of(model_admin: Any, request: HttpRequest, **own: Any) -> dict[str, Any]:
    """The context of a page that extends `page.html`; `own` has at least its title."""
    return {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "crumbs_in_list": django.VERSION >= (6, 1),
        **own,
    }
