"""An app for worker processes in which time passes and children answer; installed in theirs alone.

They run with `env=patient_env(...)`; the test itself calls `declare()` in its own registry.
"""
