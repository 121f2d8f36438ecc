"""A worker in its own process, for as long as a command needs one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from django.conf import settings
from django.core.management.base import CommandError

STOP_WITHIN = 15  # seconds


@dataclass(frozen=True)
class Worker:
    process: subprocess.Popen[bytes]
    log: Path

    def check_running(self) -> None:
        """Raises `CommandError`, with the end of the worker's log, when it has ended."""
        if (code := self.process.poll()) is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise CommandError(f"The worker ended with exit code {code}. {self.log} ends:\n{tail}")


@contextmanager
def running_worker(threads: int) -> Iterator[Worker]:
    """Run `manage.py rundramatiq` with one process; it is stopped when the block ends."""
    log = settings.BASE_DIR / "demo-worker.log"
    command = [sys.executable, "-m", "django", "rundramatiq"]
    command += ["--processes", "1", "--threads", str(threads)]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    with log.open("wb") as output, _terminated_as_exit():
        process = subprocess.Popen(  # noqa: S603  our own arguments
            command,
            cwd=settings.BASE_DIR,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Worker(process, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """A SIGTERM raises SystemExit meanwhile, so that the worker is stopped first."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
