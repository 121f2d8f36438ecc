"""Found by the worker processes that have this app."""

from tests.observed.declared import declare

declare()
