"""Threads that talk to the hub, and the signal that ends them, also where it is silent.

Neither this node nor its process waits for their end.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ...placement.errors import DownloadFailed

T = TypeVar("T")


class Stopped(Exception):
    """The caller stopped the download, or another stream of it has failed."""


class StopSignal:
    """Set once. It shuts the sockets that it watches, so that a thread that reads one wakes up."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._limits: set[threading.Event] = set()
        """Limits of blocks that run; an event is set once its block is late."""
        self._lock = threading.Lock()

    def set(self) -> None:
        self._event.set()
        self._shut_all()

    @contextmanager
    def limit(self, seconds: float, about: str) -> Generator[None]:
        """Shuts the sockets once the block takes longer, and those that it opens later, so that it
        raises DownloadFailed; where the signal is set, it raises Stopped."""
        late = threading.Event()

        def expire() -> None:
            with self._lock:
                if late not in self._limits:
                    return  # the block has ended meanwhile
                late.set()
            self._shut_all()

        with self._lock:
            self._limits.add(late)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if self.is_set():
                raise Stopped from error
            if not late.is_set():
                raise
            raise not_in_time(seconds, about) from error
        finally:
            timer.cancel()
            with self._lock:
                self._limits.remove(late)

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Ends the work once the signal is set. Raises Stopped."""
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
            if self._event.is_set() or any(limit.is_set() for limit in self._limits):
                _shut(connection)

    def _shut_all(self) -> None:
        with self._lock:
            for each in self._sockets:
                _shut(each)


def not_in_time(seconds: float, about: str) -> DownloadFailed:
    return DownloadFailed(
        f"the hub did not end its answer about {about} within {seconds:.0f} s. Check the network, "
        "HF_ENDPOINT and the proxy's variables, and try again.",
        param="HF_ENDPOINT",
    )


def _shut(connection: socket.socket) -> None:
    """Wakes the reader. A TLS socket's own method would pull its state from under that thread."""
    with suppress(OSError):  # it has been closed
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def in_daemons(work: Sequence[Callable[[], T]], threads: int, name: str) -> list[Future[T]]:
    """Starts the work in its order, on `threads` threads at most. What is cancelled before its
    turn is left out."""
    futures = [Future[T]() for _ in work]
    pairs, lock = iter(zip(work, futures, strict=True)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                pair = next(pairs, None)
            if pair is None:
                return
            call, future = pair
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the outcome is awaited
                future.set_exception(error)

    for _ in range(min(threads, len(work))):
        threading.Thread(target=run, name=name, daemon=True).start()
    return futures


def in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Starts the work in a thread of its own."""
    return in_daemons([work], 1, name)[0]


async def stoppable(work: Callable[[StopSignal], T], name: str) -> T:
    """The outcome of the work, whose thread is stopped once this is cancelled."""
    stop = StopSignal()
    try:
        return await asyncio.wrap_future(in_daemon(lambda: work(stop), name))
    finally:
        stop.set()
