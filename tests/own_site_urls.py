"""The default admin, and a site of a project's own with the same models."""

from django.contrib import admin
from django.urls import path

from django_workflows.admin import register

backoffice = admin.AdminSite(name="backoffice")
register(backoffice)

urlpatterns = [path("admin/", admin.site.urls), path("backoffice/", backoffice.urls)]
