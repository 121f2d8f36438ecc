"""Handlers that kill or stall the process that they run in, and what runs beside them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from django.db import connection

from django_workflows import Command, Event, HandlerContext, define_workflow, handles
from django_workflows.models import Delivery, Status
from tests.models import Note, ParcelState
from tests.processes import workflow_settings


class KillWorker(Command, name="deadly.KillWorker"):
    pass


class RunBeside(Command, name="deadly.RunBeside"):
    """It is still running when the process is killed for the first time."""


class JustRun(Command, name="deadly.JustRun"):
    text: str


class Stall(Command, name="deadly.Stall"):
    pass


class OrderPlaced(Event, name="deadly.OrderPlaced"):
    order_id: UUID


def deadly_env(directory: Path, **settings: Any) -> dict[str, str]:
    """The environment of workers that have these handlers; they leave marks in the directory."""
    return {
        "DJANGO_SETTINGS_MODULE": "tests.deadly.settings",
        "DEADLY_DIRECTORY": str(directory),
        **workflow_settings(**settings),
    }


def declare() -> None:
    @handles(KillWorker, name="deadly.kill_worker", atomic=False)
    def kill_worker(message: KillWorker, context: HandlerContext) -> None:
        if _is_first_claim(context):
            _wait(lambda: _running(RunBeside))
        os.kill(os.getpid(), signal.SIGKILL)

    @handles(RunBeside, name="deadly.run_beside", atomic=False)
    def run_beside(message: RunBeside, context: HandlerContext) -> None:
        if _is_first_claim(context):
            _wait(lambda: False)  # for its end
        Note.objects.create(text="beside")

    @handles(JustRun, name="deadly.just_run")
    def just_run(message: JustRun, context: HandlerContext) -> None:
        Note.objects.create(text=message.text)

    @handles(Stall, name="deadly.stall")
    def stall(message: Stall, context: HandlerContext) -> None:
        Note.objects.create(text="stalled")
        context.send(JustRun(text="sent"))
        if _leave_mark("stalled", str(os.getpid())):
            _wait(lambda: (_directory() / "go").exists(), 60)

    workflow = define_workflow(ParcelState)

    @workflow.started_by(OrderPlaced, once_per="order_id")
    def start(message: OrderPlaced, state: ParcelState, context: Any) -> None:
        _leave_mark(f"{message.order_id}-{os.getpid()}")
        if connection.vendor == "postgresql":  # SQLite lets one transaction write at a time
            _wait(lambda: _running(OrderPlaced) == 2)
        context.send(JustRun(text=f"started {message.order_id}"))


def _is_first_claim(context: HandlerContext) -> bool:
    return Delivery.objects.filter(pk=context.delivery_id, claims=1).exists()


def _running(message: type[Command] | type[Event]) -> int:
    name = message.stored_name()
    return Delivery.objects.filter(message_name=name, status=Status.RUNNING).count()


def _wait(condition: Callable[[], Any], timeout: float = 5) -> None:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _directory() -> Path:
    return Path(os.environ["DEADLY_DIRECTORY"])


def _leave_mark(name: str, text: str = "") -> bool:
    """Whether this is the first mark of that name."""
    try:
        with (_directory() / name).open("x") as mark:
            mark.write(text)
    except FileExistsError:
        return False
    return True
