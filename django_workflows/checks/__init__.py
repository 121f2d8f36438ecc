"""System checks: wrong declarations and settings are found before the first message.

Every id stands in docs/checks.md with what it means and the remedy.
"""

from __future__ import annotations

from django.core import checks

from django_workflows.checks.brokers import check_broker
from django_workflows.checks.databases import check_connection, check_databases
from django_workflows.checks.declarations import check_declarations
from django_workflows.checks.settings import check_settings
from django_workflows.checks.states import check_states
from django_workflows.checks.steps import check_steps

TAG = "workflows"


def register() -> None:
    """Have `manage.py check` run them; those that ask a database want `--database`."""
    for check in (
        check_settings,
        check_databases,
        check_broker,
        check_declarations,
        check_steps,
        check_states,
    ):
        checks.register(check, TAG)
    checks.register(check_connection, TAG, checks.Tags.database)
