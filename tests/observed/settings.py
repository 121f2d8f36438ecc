"""The tests' settings with workers that write their spans to a file and share their metrics."""

import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
)

from tests.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.observed"]

if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    DRAMATIQ_BROKER["MIDDLEWARE"].append("dramatiq.middleware.prometheus.Prometheus")

spans = open(os.environ["SPANS"], "a", buffering=1)  # noqa: SIM115  open for as long as the process
exporter = ConsoleSpanExporter(
    out=spans,
    formatter=lambda span: f"{os.getpid()} {span.to_json(indent=None)}\n",
)
provider = TracerProvider()
provider.add_span_processor(
    BatchSpanProcessor(exporter, schedule_delay_millis=600_000)
    if os.environ.get("SPANS_AT_THE_END")
    else SimpleSpanProcessor(exporter)
)
trace.set_tracer_provider(provider)
