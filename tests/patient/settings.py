"""The tests' settings with the app in which time passes."""

# ruff: noqa: F403, F405

from tests.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.patient"]
