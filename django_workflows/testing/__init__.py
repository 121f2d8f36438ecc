"""For tests of what is declared with django_workflows; every rule is the engine's own.

Without a database: `record` a handler or step that is called, or play a `Scenario`. With one, in
the test's own transaction, without broker or threads: `run_until_idle`, `advance`, `sent`,
`failed`. `isolated_registry` is for declarations that only one test knows.

pytest has the fixtures `workflows` and `isolated_registry`. Elsewhere `moved_clock` puts back
what `advance` has moved: `self.enterContext(moved_clock())` in `setUp`.
"""

from django_workflows.registry import isolated as isolated_registry
from django_workflows.testing.driving import advance, failed, moved_clock, run_until_idle, sent
from django_workflows.testing.recording import Recorded, end_of, failure_of, record
from django_workflows.testing.scenario import Scenario

__all__ = [
    "Recorded",
    "Scenario",
    "advance",
    "end_of",
    "failed",
    "failure_of",
    "isolated_registry",
    "moved_clock",
    "record",
    "run_until_idle",
    "sent",
]
