"""Threads for whose end neither this node nor its process waits: they talk to the hub."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from .stop_signal import StopSignal

T = TypeVar("T")


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
    """The outcome of the work, whose thread is told to stop once this is cancelled."""
    stop = StopSignal()
    try:
        return await asyncio.wrap_future(in_daemon(lambda: work(stop), name))
    finally:
        stop.set()
