"""Traces and metrics of real worker processes, and processes that have neither library."""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import RequestFactory

from django_workflows import prometheus
from django_workflows.models import Lifecycle
from tests.concurrency import wait_until
from tests.models import ParcelState
from tests.processes import ROOT, Workers, environment, workflow_settings

PUBLISH = """
from opentelemetry import trace
from tests.observed.declared import ParcelPosted
from django_workflows import publish
with trace.get_tracer("tests").start_as_current_span("POST /parcels"):
    for _ in range({}):
        publish(ParcelPosted())
"""


@pytest.fixture
def spans_file(tmp_path: Path) -> Path:
    return tmp_path / "spans"


@pytest.fixture
def observed(spans_file: Path) -> dict[str, str]:
    """The environment of processes that write their spans to the file."""
    return {
        "DJANGO_SETTINGS_MODULE": "tests.observed.settings",
        "SPANS": str(spans_file),
        **workflow_settings(BACKOFF=timedelta(milliseconds=10)),
    }


def completed() -> int:
    return ParcelState.objects.filter(lifecycle=Lifecycle.COMPLETED).count()


class Span:
    """A line of the file: which process wrote it, and what."""

    def __init__(self, line: str) -> None:
        pid, text = line.split(" ", 1)
        self.pid, self.facts = int(pid), json.loads(text)
        self.name = self.facts["name"].replace("observed.", "")
        self.attributes: dict[str, Any] = self.facts["attributes"]

    @property
    def id(self) -> str:
        return str(self.facts["context"]["span_id"])

    @property
    def trace(self) -> str:
        return str(self.facts["context"]["trace_id"])


def read(file: Path) -> list[Span]:
    return [Span(line) for line in file.read_text().splitlines()]


def path_to(last: Span, spans: list[Span]) -> list[str]:
    by_id = {span.id: span for span in spans}
    path = [last]
    while parent := path[0].facts["parent_id"]:
        path.insert(0, by_id[parent])
    return [span.name for span in path]


def test_a_trace_goes_on_from_process_to_process_and_through_a_retry(
    broker_url: str,
    rundramatiq: Callable[..., Workers],
    manage: Callable[..., Any],
    observed: dict[str, str],
    spans_file: Path,
) -> None:
    workers = rundramatiq(broker_url, processes=2, env=observed)

    manage("shell", "-c", PUBLISH.format(1), broker_url=broker_url, env=observed)

    wait_until(completed, 30)
    wait_until(lambda: any(s.name == "process ParcelWeighed" for s in read(spans_file)))
    spans = read(spans_file)
    answered = next(span for span in spans if span.name == "process ParcelWeighed")
    assert path_to(answered, spans) == [
        "POST /parcels",
        "send ParcelPosted",
        "process ParcelPosted",
        "send WeighParcel",
        "process WeighParcel",
        "send ParcelWeighed",
        "process ParcelWeighed",
    ]
    assert len({span.trace for span in spans}) == 1
    tries = [span for span in spans if span.name == "process WeighParcel"]
    assert [span.attributes["django_workflows.attempt"] for span in tries] == [1, 2]
    assert [span.attributes["django_workflows.ending"] for span in tries] == ["retried", "handled"]
    assert {span.pid for span in spans if span.name.startswith("process")} <= set(
        workers.worker_pids
    )


def test_a_worker_that_is_stopped_lets_go_of_its_last_spans(
    rundramatiq: Callable[..., Workers],
    manage: Callable[..., Any],
    observed: dict[str, str],
    spans_file: Path,
) -> None:
    workers = rundramatiq(env={**observed, "SPANS_AT_THE_END": "yes"})
    manage("shell", "-c", PUBLISH.format(1), env=observed)
    wait_until(completed, 30)
    assert workers.worker_pids[0] not in {span.pid for span in read(spans_file)}

    workers.stop()

    assert "process ParcelWeighed" in {
        span.name for span in read(spans_file) if span.pid == workers.worker_pids[0]
    }


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_metrics_of_all_worker_processes_are_shown_as_one(
    rundramatiq: Callable[..., Workers],
    manage: Callable[..., Any],
    observed: dict[str, str],
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "metrics"
    directory.mkdir()
    shared = {
        "PROMETHEUS_MULTIPROC_DIR": str(directory),
        "dramatiq_prom_db": str(directory),
        "dramatiq_prom_host": "127.0.0.1",
        "dramatiq_prom_port": str(free_port),
    }
    rundramatiq(processes=2, env={**observed, **shared})

    manage("shell", "-c", PUBLISH.format(10), env=observed)

    expected = {
        ("tests.ParcelState", "handled"): 20,
        ("observed.weigh", "handled"): 10,
        ("observed.weigh", "retried"): 10,
    }
    wait_until(lambda: counted(shown_by_dramatiq(free_port)) == expected, 30)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory))
    shown = prometheus.metrics(RequestFactory().get("/metrics")).content.decode()
    assert counted(shown) == expected
    assert 'django_workflows_due{queue="default"} 0.0' in shown


def shown_by_dramatiq(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def counted(shown: str) -> Counter[tuple[str, str]]:
    """The deliveries by handler and ending."""
    lines = re.findall(r"^django_workflows_deliveries_total\{(.*)\} ([\d.e+]+)$", shown, re.M)
    found: Counter[tuple[str, str]] = Counter()
    for labels, value in lines:
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[named["handler"], named["ending"]] += int(float(value))
    return found


WITHOUT = """
import datetime, sys
for library in {libraries}:
    sys.modules[library] = None  # as if it were not installed
import django
django.setup()
from django_workflows import logs, observing, publish, testing
from tests.models import ParcelState
from tests.observed import declared
declared.declare()
print("OBSERVERS", *(type(observer).__module__ for observer in observing.observers))
with testing.moved_clock():
    publish(declared.ParcelPosted())
    testing.run_until_idle()
    testing.advance(datetime.timedelta(minutes=1))
print("ENDED", *ParcelState.objects.values_list("lifecycle", flat=True))
print("LOADED", *sorted(
    name for name, module in sys.modules.items()
    if module and name.partition(".")[0] in ("opentelemetry", "prometheus_client")
))
"""


@pytest.mark.parametrize(
    ("missing", "observers"),
    [
        (["opentelemetry", "prometheus_client"], []),
        (["opentelemetry"], ["django_workflows.prometheus"]),
        (["prometheus_client"], ["django_workflows.otel"]),
        ([], ["django_workflows.otel", "django_workflows.prometheus"]),
    ],
    ids=["neither", "no otel", "no prometheus", "both"],
)
def test_everything_works_with_and_without_the_libraries(
    missing: list[str], observers: list[str], transactional_db: None, database_url: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(libraries=missing)],
        cwd=ROOT,
        env=environment(database_url, "db://", {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    said = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stderr
    assert said["OBSERVERS"] == observers
    assert said["ENDED"] == ["completed"]
    assert not {name.partition(".")[0] for name in said["LOADED"]} & set(missing)
