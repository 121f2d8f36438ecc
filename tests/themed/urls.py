"""The default site, which the theme has replaced, and one on which our admins are extended."""

from django.contrib import admin
from django.urls import path
from unfold.admin import ModelAdmin
from unfold.sites import UnfoldAdminSite

from django_workflows.admin import DeliveryAdmin, WorkflowStateAdmin, register
from django_workflows.models import Delivery
from testproject.orders.models import FulfilmentState

backoffice = UnfoldAdminSite(name="backoffice")


class ThemedDeliveries(DeliveryAdmin, ModelAdmin):
    """A project's own, with the theme's base as well."""


class ThemedFulfilments(WorkflowStateAdmin, ModelAdmin):
    list_display = ("order_id", "status", "lifecycle_badge")
    list_filter = ("status", "lifecycle")
    readonly_fields = ("order_id",)


backoffice.register(Delivery, ThemedDeliveries)
backoffice.register(FulfilmentState, ThemedFulfilments)
register(backoffice)

urlpatterns = [path("admin/", admin.site.urls), path("backoffice/", backoffice.urls)]
