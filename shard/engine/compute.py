"""The one thread that owns MLX: short jobs first, then the engine's next step.

MLX arrays belong to the thread that made them, so loading, forwards and the conversion to bytes all
happen here; bytes, ids and texts are handed over.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...placement.errors import ExoNodeError

T = TypeVar("T")
log = logging.getLogger(__name__)


def as_exception(fault: BaseException) -> Exception:
    """What may be raised on another thread: SystemExit of a library would end the process there."""
    if isinstance(fault, Exception):
        return fault
    return ExoNodeError(f"a library tried to end the process: {type(fault).__name__}: {fault}")


def as_job(work: Callable[[], T]) -> "tuple[Callable[[], None], Future[T]]":
    """What runs `work` on the compute thread, and the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        # The edge of the compute thread: a job may raise anything, and who waits must hear it.
        except BaseException as fault:
            future.set_exception(as_exception(fault))
        else:
            future.set_result(result)

    return run, future


class ComputeThread:
    """Started at construction; `close` ends it after the current step."""

    def __init__(
        self,
        name: str = "compute",
        died: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`died` is told, on the thread itself, of a fault of its own; nothing runs after it."""
        self._died = died
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._step: Callable[[], bool] | None = None
        self.progress = 0
        """Jobs and steps finished: it grows while the thread is alive and has work."""
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Runs `job` before the engine's next step."""
        run, future = as_job(job)
        self._inbox.put(run)
        return future

    def post(self, run: Callable[[], None]) -> None:
        """As `submit`, for what reports its own faults."""
        self._inbox.put(run)

    def attach(self, step: Callable[[], bool]) -> None:
        """`step` does an engine's next piece of work, if there is any: it is called between jobs
        until it says that there was none, and then again behind the next job."""
        self._step = step

    def close(self, timeout_s: float = 5.0) -> None:
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _live(self) -> None:
        """Jobs and steps report their own faults; one that comes out here is the loop's."""
        try:
            self._loop()
        # A thread that ends by itself says nothing: the runner would serve on and compute nothing.
        except BaseException as fault:
            log.critical("the compute thread died", exc_info=fault)
            if self._died is None:
                raise
            self._died(fault)

    def _loop(self) -> None:
        busy = False
        while True:
            try:
                job = self._inbox.get(block=not busy)
            except queue.Empty:
                assert self._step is not None
                busy = self._step()
                self.progress += busy
                continue
            if job is None:
                return
            job()
            self.progress += 1
            busy = self._step is not None
