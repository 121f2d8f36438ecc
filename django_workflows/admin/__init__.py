"""The admin of deliveries and of every workflow's instances. Nothing is registered on import.

The app registers the defaults when every app's admin.py has been imported, so that a project's
own classes win in whatever order the apps are listed; `register` does it for another site.
"""

from __future__ import annotations

from django.apps import apps
from django.contrib import admin
from django.contrib.admin import AdminSite

from django_workflows.admin.deliveries import DeliveryAdmin
from django_workflows.admin.states import WorkflowStateAdmin
from django_workflows.models import Delivery, WorkflowState

__all__ = ["DeliveryAdmin", "WorkflowStateAdmin", "register"]


def register(site: AdminSite = admin.site) -> None:
    """Register deliveries and every state model that this site does not have yet.

    The default site is served by the app itself, unless the admin runs without autodiscovery
    (`SimpleAdminConfig`). Call it for a site of your own, after your own registrations.
    """
    defaults: dict[type, type] = {Delivery: DeliveryAdmin}
    for model in apps.get_models():
        if issubclass(model, WorkflowState) and not model._meta.proxy:
            defaults[model] = WorkflowStateAdmin
    for model, model_admin in defaults.items():
        if not site.is_registered(model):
            site.register(model, model_admin)
