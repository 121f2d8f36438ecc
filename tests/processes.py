"""Other processes on the tests' database: commands, and workers that may be killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.concurrency import wait_until

ROOT = Path(__file__).resolve().parent.parent
READY = re.compile(r"\[PID (\d+)\].*Worker process is ready for action")


def environment(database_url: str, broker_url: str, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DATABASE_URL": database_url,
        "BROKER_URL": broker_url,
        "LOG_LEVEL": "INFO",
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def workflow_settings(**settings: Any) -> dict[str, str]:
    """DJANGO_WORKFLOWS for another process: `env=workflow_settings(LEASE=timedelta(seconds=2))`."""
    values = {
        key: {"seconds": value.total_seconds()} if isinstance(value, timedelta) else value
        for key, value in settings.items()
    }
    return {"DJANGO_WORKFLOWS": json.dumps(values)}


def run_manage(
    *arguments: object, env: Mapping[str, str], timeout: float = 120, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`manage.py` in a process of its own; unless told otherwise, its failure fails the test."""
    command = [sys.executable, "manage.py", *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        shown = " ".join(map(str, arguments))
        pytest.fail(f"manage.py {shown}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def is_alive(pid: int) -> bool:
    """Whether the process still runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Workers:
    """One `rundramatiq`: a master and its worker processes, in a process group of their own."""

    def __init__(self, env: Mapping[str, str], log: Path, processes: int, threads: int) -> None:
        self.log = log
        self.processes = processes
        self._env = env
        self._threads = threads
        self._master: subprocess.Popen[bytes] | None = None
        self._read_from = 0
        self._changing = threading.RLock()

    def start(self, timeout: float = 60) -> None:
        """Start them and wait until each worker process is ready."""
        with self._changing:
            self._read_from = self.log.stat().st_size if self.log.exists() else 0
            options = f"--processes {self.processes} --threads {self._threads} "
            options += "--worker-shutdown-timeout 5000"
            with self.log.open("ab") as log:
                self._master = subprocess.Popen(
                    [sys.executable, "manage.py", "rundramatiq", *options.split()],
                    cwd=ROOT,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        wait_until(lambda: self._are_ready() or not self.running, timeout)
        assert self.running, f"the workers did not start:\n{self.read_log(self._read_from)}"

    def stop(self, timeout: float = 15) -> None:
        """Ask them to stop; end by force what has not stopped in time."""
        with self._changing:
            if self._master is not None and self.running:
                self._master.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._master.wait(timeout)
            self.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """kill -9 of the master and all of its worker processes."""
        with self._changing:
            if self._master is None:
                return
            # The group outlives its master: orphaned workers are still in it.
            with suppress(ProcessLookupError):
                os.killpg(self._master.pid, signal.SIGKILL)
            self._master.wait()
            self._master = None

    def kill_master(self) -> None:
        """kill -9 of the master alone; its worker processes are orphans now."""
        assert self._master is not None
        os.kill(self._master.pid, signal.SIGKILL)
        self._master.wait()

    def kill_one_worker(self) -> int:
        """kill -9 of one worker process; its pid. Dramatiq then stops the others and ends."""
        pid = self.worker_pids[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    @property
    def running(self) -> bool:
        return self._master is not None and self._master.poll() is None

    @property
    def pid(self) -> int:
        """The master's."""
        assert self._master is not None
        return self._master.pid

    @property
    def worker_pids(self) -> list[int]:
        """Those that became ready since the last start, dead or alive."""
        return [int(pid) for pid in READY.findall(self.read_log(self._read_from))]

    def read_log(self, start: int = 0) -> str:
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[start:].decode(errors="replace")

    def _are_ready(self) -> bool:
        return len(self.worker_pids) >= self.processes


@contextmanager
def supervised(workers: Workers) -> Iterator[None]:
    """Start the workers again whenever they have ended, as a supervisor would."""
    enough = threading.Event()

    def watch() -> None:
        while not enough.wait(0.1):
            if not workers.running:
                workers.kill()
                with suppress(AssertionError):  # killed while starting: the next turn starts them
                    workers.start()

    supervisor = threading.Thread(target=watch, name="supervisor")
    supervisor.start()
    try:
        yield
    finally:
        enough.set()
        supervisor.join()
