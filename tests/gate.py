"""A door in front of a real broker that a test can shut: the broker that is down, and back."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit


class Gate:
    """Listens on a port of its own and passes everything on to the broker at `url`.

    `shut()` refuses connections and breaks those that are there; `open()` lets them in again, at
    the same port. `hold()` accepts them and never answers.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._behind = (parts.hostname or "127.0.0.1", parts.port or 0)
        self._sockets: list[socket.socket] = []
        self._listener: socket.socket | None = None
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self._port = int(unused.getsockname()[1])
        login = parts.netloc.rpartition("@")[0]
        netloc = f"{login}@127.0.0.1:{self._port}" if login else f"127.0.0.1:{self._port}"
        self.url = urlunsplit(parts._replace(netloc=netloc))

    def open(self) -> None:
        self._listen(self._pass_on)

    def hold(self) -> None:
        self._listen(lambda client: self._sockets.append(client))

    def shut(self) -> None:
        for open_socket in (self._listener, *self._sockets):
            if open_socket is not None:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
                open_socket.close()
        self._listener, self._sockets = None, []

    def _listen(self, receive: Callable[[socket.socket], None]) -> None:
        self.shut()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        self._listener = listener

        def accept() -> None:
            with suppress(OSError):  # the listener was shut
                while True:
                    receive(listener.accept()[0])

        threading.Thread(target=accept, name="gate", daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(self._behind, timeout=5)
        server.settimeout(None)
        self._sockets += [client, server]
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=_pump, args=(source, target), name="gate", daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
