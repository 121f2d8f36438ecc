"""An app for worker processes that are to be killed or stopped; installed in theirs alone.

They run with `env=deadly_env(...)`; the test itself calls `declare()` in its own registry.
"""
