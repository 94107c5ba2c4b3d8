"""The one thread that owns MLX: short jobs first, then the engine's next step.

MLX arrays belong to the thread that made them, so loading, forwards and conversions to bytes run
here; other threads get bytes, ids and texts.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...placement.errors import DeviceLost, ExoNodeError
from ...placement.gpu_faults import gpu_fault, is_failed_command

T = TypeVar("T")
log = logging.getLogger(__name__)


def as_exception(fault: BaseException) -> Exception:
    """An exception that may be raised on another thread, where SystemExit would end the process."""
    if isinstance(fault, Exception):
        return fault
    return ExoNodeError(f"a library tried to end the process: {type(fault).__name__}: {fault}")


def device_lost(fault: BaseException, *, keeps_chunk: bool = True) -> DeviceLost | None:
    """The error with which a GPU fault ends the process, or None if it need not end.

    MLX reports a command that failed once, in whichever call comes next, and what that command
    should have written stays undefined: prefixes and other answers' caches among it. Want of memory
    leaves all as it was, but only another process has a shorter chunk (unless it `keeps_chunk`).
    """
    if isinstance(fault, DeviceLost):
        return fault
    kind = gpu_fault(str(fault))
    if kind is None or (kind == "memory" and keeps_chunk and not is_failed_command(str(fault))):
        return None
    return DeviceLost(f"the GPU ended a computation, and its process with it: {fault}")


def as_job(work: Callable[[], T]) -> "tuple[Callable[[], None], Future[T]]":
    """A job for `ComputeThread.post` that runs `work`, and the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        # The edge of the compute thread: a job may raise anything, which the caller must get.
        except BaseException as fault:
            lost = device_lost(fault)
            future.set_exception(lost or as_exception(fault))
            if lost is not None:
                raise lost from fault
        else:
            future.set_result(result)

    return run, future


class ComputeThread:
    """A thread that runs jobs and an engine's steps. It starts at construction."""

    def __init__(
        self,
        name: str = "compute",
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`on_death` is called, on the thread itself, with an error of the thread; it then ends."""
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._step: Callable[[], bool] | None = None
        self.progress = 0
        """Number of finished jobs and steps: it grows while the thread is alive and has work."""
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Runs `job` before the engine's next step."""
        run, future = as_job(job)
        self._inbox.put(run)
        return future

    def post(self, run: Callable[[], None]) -> None:
        """Runs `run`, which must handle its own errors, before the engine's next step."""
        self._inbox.put(run)

    def attach(self, step: Callable[[], bool]) -> None:
        """Sets the engine's `step`, which does one piece of work and returns False if there was
        none. It is called between jobs until then, and again after the next job."""
        self._step = step

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the current job or step."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _live(self) -> None:
        """Runs the loop. Jobs and steps handle their own errors; others are the loop's."""
        try:
            self._loop()
        # Without this the thread would end unnoticed: the runner would serve and compute nothing.
        except BaseException as fault:
            log.critical("the compute thread died", exc_info=fault)
            if self._on_death is None:
                raise
            self._on_death(fault)

    def _loop(self) -> None:
        busy = False
        while True:
            try:
                job = self._inbox.get(block=not busy)
            except queue.Empty:
                step = self._step
                assert step is not None
                busy = step()
                self.progress += busy
                continue
            if job is None:
                return
            job()
            self.progress += 1
            busy = self._step is not None
