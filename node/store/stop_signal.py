"""The signal that ends a download from another thread, also where its connections are silent."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class Stopped(Exception):
    """The caller stopped the download, or another stream of it has failed."""


class StopSignal:
    """Set once. It shuts the sockets that it watches, so that a thread that reads one wakes up."""

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

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Watches every socket that an HTTP client opens: the `trace` extension of its requests."""
        if not event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            return
        connection = info["return_value"].get_extra_info("socket")
        with self._lock:
            self._sockets.add(connection)
            if self._event.is_set():
                _shut(connection)


def _shut(connection: socket.socket) -> None:
    """Wakes the reader. A TLS socket's own method would pull its state from under that thread."""
    with suppress(OSError):  # it has been closed
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
