"""Settings of the test project. What differs between machines is an environment variable:

DATABASE_URL          sqlite:///name or postgres://user:password@host:port/name; default db.sqlite3
BROKER_URL            db:// (the database delivers; the default), redis://... or amqp://...
PAYMENT_DECLINE_RATE  share of the orders whose payment is declined; default 0.05
PAYMENT_FLAKY_RATE    share of the attempts at which the payment provider raises; default 0.05
PAYMENT_OVERDUE_AFTER seconds after which an unpaid order is given up; default one day
SHIPMENT_FAIL_RATE    share of the orders that cannot be shipped, and are undone; default 0
CREDIT_CHECK_OVER     amount over which the credit of an order is checked; default 1000
CREDIT_REFUSE_RATE    share of the checked orders that the credit agency refuses; default 0.05
CREDIT_SILENT_RATE    share of the checked orders that it never answers about; default 0
AGENCY_OVERDUE_AFTER  seconds after which its answer is no longer waited for; default one hour
SECRET_KEY, DEBUG, LOG_LEVEL
"""

from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import environ

from django_workflows.broker import dramatiq_settings
from testproject.database import database_settings

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

SECRET_KEY = env.str("SECRET_KEY", default="insecure-and-good-enough-for-a-test-project")
# Off by default: with it Django keeps every query that a worker makes.
DEBUG = env.bool("DEBUG", default=False)
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]", "testserver"]

DATABASE_URL = env.str("DATABASE_URL", default="sqlite:///db.sqlite3")
DATABASES = {"default": database_settings(DATABASE_URL, BASE_DIR)}

# Always in full: the default of django-dramatiq 0.15 does not start under Dramatiq 2.
BROKER_URL = env.str("BROKER_URL", default="db://")
DRAMATIQ_BROKER = dramatiq_settings(BROKER_URL)

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_dramatiq",
    "django_workflows",
    "testproject.orders",
    "testproject.orders_functions",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "testproject.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": env.str("LOG_LEVEL", default="WARNING")},
}

# What the pretend provider, carrier and agency do; see the modules of these names.
PAYMENT_DECLINE_RATE = env.float("PAYMENT_DECLINE_RATE", default=0.05)
PAYMENT_FLAKY_RATE = env.float("PAYMENT_FLAKY_RATE", default=0.05)
PAYMENT_OVERDUE_AFTER = timedelta(seconds=env.float("PAYMENT_OVERDUE_AFTER", default=86_400.0))
SHIPMENT_FAIL_RATE = env.float("SHIPMENT_FAIL_RATE", default=0.0)
CREDIT_CHECK_OVER = Decimal(env.str("CREDIT_CHECK_OVER", default="1000"))
CREDIT_REFUSE_RATE = env.float("CREDIT_REFUSE_RATE", default=0.05)
CREDIT_SILENT_RATE = env.float("CREDIT_SILENT_RATE", default=0.0)
AGENCY_OVERDUE_AFTER = timedelta(seconds=env.float("AGENCY_OVERDUE_AFTER", default=3_600.0))
