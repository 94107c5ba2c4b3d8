"""The signal that ends a download from another thread, also where its connections are silent."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress


class Stopped(Exception):
    """The caller stopped the download, or another stream of it has failed."""


class StopSignal:
    """Set once. It shuts the sockets that are watched, so that a thread that reads one wakes up."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            self._event.set()
            for each in self._sockets:
                _shut(each)

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped once the signal is set."""
        if self._event.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Waits. Raises Stopped as soon as the signal is set."""
        if self._event.wait(seconds):
            raise Stopped

    @contextmanager
    def watching(self, connection: object) -> Generator[None]:
        """Shuts `connection` when the signal is set, if it is a socket."""
        if not isinstance(connection, socket.socket):
            yield
            return
        with self._lock:
            self._sockets.add(connection)
            if self._event.is_set():
                _shut(connection)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(connection)


def _shut(connection: socket.socket) -> None:
    """Wakes the reader. A TLS socket's own method would pull its state from under that thread."""
    with suppress(OSError):  # the other side was quicker
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
