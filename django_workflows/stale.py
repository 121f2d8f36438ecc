"""Connections that are stale: closed before and after every delivery and every wait."""

from __future__ import annotations

from django.db import connections


def close_stale_connections() -> None:
    """Close this thread's connections that are broken or too old.

    As Django's `close_old_connections`, except that a connection with an open transaction is
    left alone: a test that handles deliveries in its own transaction needs it.
    """
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
