"""DJANGO_WORKFLOWS, and the settings of Django that everything leans on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, get_args, get_type_hints

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage
from django.utils.module_loading import import_string

from django_workflows import conf
from django_workflows.checks.reports import Problems, error
from django_workflows.errors import did_you_mean


def check_settings(**_kwargs: Any) -> list[CheckMessage]:
    found = [*no_time_zones(), *no_dramatiq(), *no_broker()]
    given = getattr(django_settings, "DJANGO_WORKFLOWS", {})
    if not isinstance(given, dict):
        return [*found, not_a_dict(given)]
    found += unknown_keys(given)
    # Each can be judged only when what stands before it is right.
    for judge in (partial(wrong_types, given), no_policy, out_of_range, contradictions):
        if wrong := list(judge()):
            return found + wrong
    return found


def no_time_zones() -> Problems:
    """E106: a moment is one moment everywhere."""
    if not django_settings.USE_TZ:
        yield error(
            106,
            "USE_TZ is False, and due times need aware datetimes.",
            "Set USE_TZ = True.",
        )


def no_dramatiq() -> Problems:
    """E104: workers are django-dramatiq's."""
    if not apps.is_installed("django_dramatiq"):
        yield error(
            104,
            "'django_dramatiq' is not in INSTALLED_APPS, so no worker would handle a message.",
            "Add 'django_dramatiq' to INSTALLED_APPS, before 'django_workflows'.",
        )


def no_broker() -> Problems:
    """E105: django-dramatiq's default does not even start under Dramatiq 2."""
    if apps.is_installed("django_dramatiq") and not hasattr(django_settings, "DRAMATIQ_BROKER"):
        yield error(
            105,
            "DRAMATIQ_BROKER is not set, and django-dramatiq's default wants a RabbitMQ on this "
            "machine and fails under Dramatiq 2.",
            "Set DRAMATIQ_BROKER = django_workflows.broker.dramatiq_settings('db://'), or with the "
            "URL of a Redis or RabbitMQ.",
        )


# DJANGO_WORKFLOWS


def not_a_dict(given: Any) -> CheckMessage:
    return error(
        102,
        f"DJANGO_WORKFLOWS is {given!r:.100}, which is no dict.",
        "Set it to a dict, such as {'ATTEMPTS': 5}, or remove it.",
    )


def unknown_keys(given: Mapping[str, Any]) -> Problems:
    """E101: a misspelt key would change nothing."""
    for key in given:
        if key not in conf.KEYS:
            yield error(
                101,
                f"DJANGO_WORKFLOWS has the key {key!r}, which is unknown.",
                f"{did_you_mean(str(key), conf.KEYS)} Correct or remove {key!r}.",
            )


def wrong_types(given: Mapping[str, Any]) -> Problems:
    """E102: each key has a value of its default's type."""
    for key, wanted in get_type_hints(conf.Settings).items():
        kinds = get_args(wanted) or (wanted,)
        if wanted is Any:
            continue  # `no_policy` judges it
        if key in given and not any(_is_a(given[key], kind) for kind in kinds):
            name = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
            example = getattr(conf.Settings(), key)
            yield error(
                102,
                f"DJANGO_WORKFLOWS[{key!r}] is {given[key]!r:.100}, which is no {name}.",
                f"Write a {name}, such as the default {example!r}.",
            )


def no_policy() -> Problems:
    """E102 again: RECOVERY is a function, or leads to one."""
    named = conf.current().RECOVERY
    if named is None or callable(named):
        return
    problem = "which is neither a function nor the dotted path of one"
    if isinstance(named, str):
        try:
            if callable(import_string(named)):
                return
        except Exception as error_of_import:  # whatever the module raises
            problem = f"which cannot be imported: {error_of_import}"
    yield error(
        102,
        f"DJANGO_WORKFLOWS['RECOVERY'] is {named!r:.100}, {problem.rstrip('.')}.",
        "Write the dotted path of a function (error, facts), such as 'orders.recovery.policy', "
        "or None for the settings alone.",
    )


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


#: What is nothing without being more than zero.
POSITIVE = (
    "ATTEMPTS", "LOSSES", "LEASE", "RUN_LIMIT", "RELAY_EVERY", "POLL_EVERY", "RELAY_BATCH",
    "MAX_BODY_BYTES", "BACKOFF_FACTOR",
)  # fmt: skip


def out_of_range() -> Problems:
    """E103: values of the right type that cannot work."""
    settings = conf.current()
    for key in conf.KEYS:
        value: Any = getattr(settings, key)
        zero: Any = timedelta(0) if isinstance(value, timedelta) else 0
        if value is None or isinstance(value, str) or callable(value):
            continue
        if value < zero or (key in POSITIVE and value == zero):
            least = "more than zero" if key in POSITIVE else "zero or more"
            yield _nonsense(f"DJANGO_WORKFLOWS[{key!r}] is {value!s}.", f"Set it to {least}.")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9._-]*", settings.QUEUE):
        yield _nonsense(
            f"DJANGO_WORKFLOWS['QUEUE'] is {settings.QUEUE!r}, which is no name of a queue.",
            "Begin with a letter or '_', and go on with letters, digits and '._-'.",
        )


def contradictions() -> Problems:
    """E103 again: values that cannot work together."""
    settings = conf.current()
    for smaller, larger, why in (
        ("LEASE", "RUN_LIMIT", "a run may last a lease at least"),
        ("RELAY_EVERY", "LEASE", "the relay must look more often than leases run out"),
        ("BACKOFF", "BACKOFF_MAX", "the first wait is the shortest"),
    ):
        low, high = getattr(settings, smaller), getattr(settings, larger)
        if low > high:
            yield _nonsense(
                f"DJANGO_WORKFLOWS[{smaller!r}] is {low}, more than {larger!r}, which is {high}; "
                f"{why}.",
                f"Lower {smaller} or raise {larger}.",
            )


def _nonsense(text: str, hint: str) -> CheckMessage:
    return error(103, text, hint)
