"""The Django app: finds what is declared in the installed apps and connects it to Dramatiq."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig, apps
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class WorkflowsConfig(AppConfig):
    name = "django_workflows"
    verbose_name = _("Workflows")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_workflows import checks  # needs the models, which exist only now

        checks.register()
        autodiscover_modules("messages", "workflows", "handlers")
        observe()
        if apps.is_installed("django_dramatiq"):
            from django_workflows import actors  # likewise

            actors.install()
        if apps.is_installed("django.contrib.admin"):
            register_admin()


#: What observes deliveries, and the library that it needs.
OBSERVERS = {
    "django_workflows.otel": "opentelemetry.trace",
    "django_workflows.prometheus": "prometheus_client",
}


def observe() -> None:
    """Let tracing and metrics watch deliveries, as far as their libraries are installed."""
    from django_workflows import observing  # likewise

    for module, library in OBSERVERS.items():
        try:
            import_module(library)
        except ImportError:
            continue
        observing.observers += (import_module(module).observer,)


def register_admin() -> None:
    """Register what no app has registered itself, in whatever order the apps are listed.

    Every admin.py has been imported by then: this does what the admin's own app does when its
    turn comes, or has done already. Not where the project has switched autodiscovery off.
    """
    from django.contrib import admin  # likewise
    from django.contrib.admin.apps import AdminConfig

    from django_workflows.admin import register

    if isinstance(apps.get_app_config("admin"), AdminConfig):
        admin.autodiscover()
        register()
