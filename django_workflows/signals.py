"""Signals, sent after the commit, by the worker that did the work.

`sender` is the state's class for a workflow and the function for a plain handler. Receivers get
`delivery` (a `Delivery` as claimed, with its ending) and, for workflows, `instance` (or None).
A receiver that raises is logged and changes nothing.
"""

from django.dispatch import Signal

workflow_started = Signal()
workflow_completed = Signal()
delivery_handled = Signal()
#: Sent when a delivery has failed for good; `error` is the last exception.
delivery_failed = Signal()
