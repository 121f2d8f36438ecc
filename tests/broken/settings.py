"""A project that `manage.py check` has much to say about."""

from testproject.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.broken"]
DATABASES["default"]["OPTIONS"]["isolation_level"] = 4  # serializable
