"""A site on which a project's own admins extend ours."""

from typing import Any

from django.contrib import admin
from django.urls import path

from django_workflows.admin import DeliveryAdmin, WorkflowStateAdmin, register
from django_workflows.models import Delivery
from tests.models import ParcelState


class OfOneTenant(DeliveryAdmin):
    """Shows, and lets act on, the deliveries of one tenant only."""

    actions = (*DeliveryAdmin.actions, "count_them")

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).filter(attributes__tenant="acme")

    @admin.action(description="Count them")
    def count_them(self, request: Any, queryset: Any) -> None:
        self.message_user(request, f"There are {queryset.count()}.")


class Parcels(WorkflowStateAdmin):
    list_display = ("customer", "lifecycle_badge", "number")
    list_filter = ("lifecycle", "insured")
    fieldsets = ((None, {"fields": ("customer", ("number", "weight"))}),)
    search_fields = ("customer",)


site = admin.AdminSite(name="shop")
site.register(Delivery, OfOneTenant)
site.register(ParcelState, Parcels)
register(site)

urlpatterns = [path("shop/", site.urls)]
