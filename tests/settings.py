"""The test project with the tests' own app; for pytest and for the processes that it starts.

`DATABASE_URL` names the server, and any SQLite URL runs the suite on SQLite. Without it pytest
runs on a PostgreSQL that pip installed, which `conftest.py` starts when a test asks for a database.
"""

import json
import os
from datetime import timedelta

import django

NEEDS_PIP_POSTGRES = not os.environ.get("DATABASE_URL")
if NEEDS_PIP_POSTGRES:
    os.environ["DATABASE_URL"] = "postgres:///not-started-yet"

from testproject.settings import *  # noqa: E402

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.postgres", "tests"]
if django.VERSION >= (6, 0):  # what the browser refuses, the tests in the browser see
    MIDDLEWARE = [*MIDDLEWARE, "django.middleware.csp.ContentSecurityPolicyMiddleware"]
    SECURE_CSP = {"default-src": ["'self'"], "img-src": ["'self'", "data:"]}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# `tests.processes` reads from a worker's log which processes are ready.
LOGGING["formatters"]["line"]["format"] = "[PID %(process)d] %(asctime)s %(name)s: %(message)s"

# How a test gives settings to another process; `tests.processes.workflow_settings` writes it.
DJANGO_WORKFLOWS = {
    key: timedelta(**value) if isinstance(value, dict) else value
    for key, value in json.loads(os.environ.get("DJANGO_WORKFLOWS", "{}")).items()
}
