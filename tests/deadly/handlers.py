"""Found by the worker processes that have this app."""

from tests.deadly.declared import declare

declare()
