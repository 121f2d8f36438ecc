"""The Django app: finds what is declared in the installed apps and connects it to Dramatiq."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.utils.module_loading import autodiscover_modules


class WorkflowsConfig(AppConfig):
    name = "django_workflows"
    verbose_name = "Workflows"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        autodiscover_modules("messages", "workflows", "handlers")
        if apps.is_installed("django_dramatiq"):
            from django_workflows import actors  # needs the models, which exist only now

            actors.install()
