"""Which errors say that the database is away, so that no message is blamed for it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections
from django.db.utils import ConnectionHandler

from django_workflows import recovery

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def error_of_connecting(**where: Any) -> BaseException:
    """What Django raises when it connects to a server there."""
    settings = {**connections.settings["default"], "HOST": "127.0.0.1", **where}
    settings["OPTIONS"] = {"connect_timeout": 2, **where.get("OPTIONS", {})}
    with pytest.raises(DatabaseError) as caught:
        ConnectionHandler({"default": settings})["default"].ensure_connection()
    return caught.value


@contextmanager
def listening(*, answers: bool) -> Iterator[int]:
    """The port of something that is no PostgreSQL: it hangs up on who connects, or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        if answers:
            threading.Thread(target=hang_up, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_refused_connection_is_an_outage() -> None:
    error = error_of_connecting(PORT="1")

    assert recovery.is_outage(error)


def test_a_socket_that_is_not_there_is_an_outage() -> None:
    error = error_of_connecting(HOST="/nowhere")

    assert recovery.is_outage(error)


def test_a_host_that_has_no_address_is_an_outage() -> None:
    error = error_of_connecting(HOST="nowhere.invalid")

    assert recovery.is_outage(error)


def test_a_server_that_hangs_up_is_an_outage() -> None:
    with listening(answers=True) as port:
        error = error_of_connecting(PORT=str(port))

    assert recovery.is_outage(error)


def test_a_server_that_does_not_answer_is_an_outage() -> None:
    with listening(answers=False) as port:
        error = error_of_connecting(PORT=str(port))

    assert recovery.is_outage(error)


def test_a_connection_that_the_server_ends_is_an_outage() -> None:
    with connection.cursor() as cursor, pytest.raises(DatabaseError) as caught:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    connection.close()

    assert recovery.is_outage(caught.value)


def test_a_statement_that_is_wrong_is_no_outage() -> None:
    with connection.cursor() as cursor, pytest.raises(DatabaseError) as caught:
        cursor.execute("SELECT nothing")

    assert not recovery.is_conflict(caught.value)


def test_a_statement_that_is_cancelled_is_no_outage() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 50")
        with pytest.raises(DatabaseError) as caught:
            cursor.execute("SELECT pg_sleep(5)")
    connection.close()

    assert not recovery.is_conflict(caught.value)
