"""The one thread that owns MLX: short jobs first, then the engine's next step, or turns.

A whole model's requests are an engine's (`attach`). Over stages each request is a generation that
takes turns with the others. A turn of one that reads its prompt is a chunk. Behind it those that
answer have a round each, and as much time as it took. The turn of an answer whose rounds come from
other nodes begins when one is back, and ends when the next one has set out.

MLX arrays belong to the thread that made them, so loading, forwards and the conversion to bytes all
happen here; bytes, ids and texts are handed over.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from ...mtp.seams import Wait
from ...mtp.steps import Prefilled
from ...placement.errors import ExoNodeError

T = TypeVar("T")
BACK: Final = 2
"""The most items that an answer hands out with what it waited for: a prompt's end and a round."""

log = logging.getLogger(__name__)

OUTBOX_LIMIT = 256
"""Items that a slow reader may leave unread before its generation is paused."""


class Run:
    """One generation being driven. `deliver` and `done` are called on the compute thread."""

    def __init__(
        self,
        steps: Generator[Any, None, None],
        deliver: Callable[[Any], None],
        done: Callable[[BaseException | None], None],
        wake: Callable[["Run"], None],
        background: bool = False,
    ) -> None:
        self.background = background
        self._steps = steps
        self._deliver = deliver
        self._done = done
        self._wake = wake
        self._unread = 0
        self._lock = threading.Lock()
        self._parked = False
        self._cancelled = False
        self._over = False
        self.waited = False
        """Whether its last turn computed nothing and went on to wait."""
        self.reads = True
        """Whether its next turn is likely a chunk of its prompt."""
        self.goes_on = False
        """Whether its last turn was only a part of one: it comes before the next chunk."""
        self._back = 0
        """Items since it waited that are no turn: it hands them out before it sets out again."""
        self.had = 0
        """When it had its last turn; see `Turns`."""

    def cancel(self) -> None:
        """From any thread: the generator is closed at once, even while it waits for a future."""
        with self._lock:
            self._cancelled, self._parked = True, False
        self._wake(self)

    def read(self, count: int = 1) -> None:
        """From any thread: the reader took `count` items."""
        with self._lock:
            self._unread -= count
            resumes = self._parked and self._unread < OUTBOX_LIMIT
            if resumes:
                self._parked = False
        if resumes:
            self._wake(self)

    def turn(self) -> bool:
        """One step on the compute thread; False when it is not runnable now, or over."""
        if self._over:
            return False  # woken twice: by the cancellation and by what it waited for
        if self._cancelled:
            return self._end(None, close=True)
        try:
            item = next(self._steps)
        except StopIteration:
            return self._end(None)
        # The edge of the compute thread: whatever a request met, SystemExit too, the others go on.
        except BaseException as fault:
            return self._end(as_exception(fault))
        self.waited = isinstance(item, Wait)
        if isinstance(item, Wait):
            self.goes_on, self._back = item.goes_on, BACK
            self.reads = self.reads if item.reads is None else item.reads
            item.future.add_done_callback(lambda _: self._wake(self))
            return False
        self.goes_on, self._back = self._back > 0, max(0, self._back - 1)
        self.reads = isinstance(item, Prefilled) and item.done < item.total
        self._deliver(item)
        with self._lock:
            self._unread += 1
            self._parked = self._unread >= OUTBOX_LIMIT and not self._cancelled
            return not self._parked

    def _end(self, fault: BaseException | None, *, close: bool = False) -> bool:
        self._over = True
        if close:
            try:
                self._steps.close()
            except BaseException as closing:  # as in `turn`
                fault = as_exception(closing)
        self._done(fault)
        return False


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`died` is told, on the thread itself, of a fault of its own; nothing runs after it.

        `clock`: seconds, by which prompts and answers share the thread.
        """
        self._died = died
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None] | Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._step: Callable[[], bool] | None = None
        self.progress = 0
        """Jobs and steps finished: it grows while the thread is alive and has work."""
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Runs `job` before the next step of any generation."""
        run, future = as_job(job)
        self._inbox.put(run)
        return future

    def post(self, run: Callable[[], None]) -> None:
        """As `submit`, for what reports its own faults."""
        self._inbox.put(run)

    def drive(
        self,
        steps: Generator[Any, None, None],
        deliver: Callable[[Any], None],
        done: Callable[[BaseException | None], None],
        *,
        background: bool = False,
    ) -> Run:
        """Steps a generation to its end, taking turns with the others; it may yield `Wait`.

        `background`: its prompt is read while no other one is to be.
        """
        run = Run(steps, deliver, done, self._inbox.put, background)
        self._inbox.put(run)
        return run

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
        turns, busy = Turns(), False
        while True:
            try:
                message = self._inbox.get(block=not (turns or busy))
            except queue.Empty:
                if not turns:
                    assert self._step is not None
                    busy = self._step()
                    self.progress += busy
                    continue
                run, begun = turns.next(), self._clock()
                goes_on = run.turn()
                turns.took(self._clock() - begun)
                if goes_on:
                    turns.add(run)
                elif run.waited:
                    turns.spare()
                self.progress += 1
                continue
            match message:
                case None:
                    return
                case Run():
                    turns.add(message)
                case job:
                    job()
                    self.progress += 1
                    busy = self._step is not None


class Turns:
    """Who is next: all that answer, each once and for as long as the last chunk took, then one of
    those that read, and so on.

    Of those that read, the ones in the background are last.
    """

    def __init__(self) -> None:
        self._answering: deque[Run] = deque()
        self._reading: deque[Run] = deque()
        self._reading_behind: deque[Run] = deque()
        self._time = 1
        """Grows with each chunk: those of `_answering` are due that had their turn before it."""
        self._read = False
        """Whether the last turn was one of those that read."""
        self._owed_s = 0.0
        """Seconds of chunks that those that answer have not had since."""
        self._spares = 0
        """Turns without a chunk that those that read may still have before the others'."""

    def __bool__(self) -> bool:
        return bool(self._answering or self._reading or self._reading_behind)

    def add(self, run: Run) -> None:
        if not run.reads:
            if run.goes_on:
                run.had = 0
            self._answering.append(run)
        else:
            (self._reading_behind if run.background else self._reading).append(run)

    def spare(self) -> None:
        """The last turn was no chunk: each of the others that read may have one before the rest."""
        if self._read and self._spares:
            self._spares -= 1
            self._time -= 1

    def took(self, seconds: float) -> None:
        """Of the turn that `next` gave."""
        self._owed_s = max(0.0, self._owed_s + (seconds if self._read else -seconds))

    def next(self) -> Run:
        """One of those that were added; it has a turn."""
        reading = self._reading or self._reading_behind
        due = any(run.had < self._time for run in self._answering)
        if not self._answering:
            self._owed_s = 0.0
        if due or self._owed_s > 0 or not reading:
            # In order, whoever is due: one that gives others a turn does not pass them.
            run = self._answering.popleft()
            run.had, self._read = self._time, False
            return run
        if not self._read:
            self._spares = len(self._reading) + len(self._reading_behind) - 1
        self._read = True
        self._time += 1
        return reading.popleft()
