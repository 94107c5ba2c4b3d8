"""Background tasks, whose errors are logged, and loops, which restart after an error."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .events import EventLog
from .log import apart
from .timing import Timing

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]
Value = TypeVar("Value")


def background(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    """Starts `work`, which ends by itself; the caller holds the task and cancels it at the end.

    No caller awaits the task before that, so without the callback its error would be logged only
    when it is collected.
    """
    task = asyncio.create_task(work, name=name, context=apart())
    task.add_done_callback(_log_error)
    return task


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancels the tasks, and returns when all of them have ended."""
    tasks = list(tasks)
    for task in tasks:
        _ = task.cancel()
    _ = await asyncio.gather(*tasks, return_exceptions=True)


async def unless(
    end: Awaitable[Any], work: Awaitable[Value], error: Callable[[], Exception]
) -> Value:
    """The outcome of `work`. Raises `error()` if `end` is done first; neither is left running."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        _ = await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error()
        return working.result()
    finally:
        await cancel((working, ending))


def _log_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.error("%s ended by an error", task.get_name(), exc_info=fault)


@dataclass(slots=True)
class _Loop:
    name: str
    wait_s: float
    failure: str = ""
    logged_at: dict[str, float] = field(default_factory=dict[str, float])
    """The time of the last log line by cause."""


class Loops:
    """Runs the node's endless work: restarts what ends by an error, with exponential backoff."""

    def __init__(self, events: EventLog, timing: Timing) -> None:
        self._events = events
        self._timing = timing
        self._down: dict[str, str] = {}

    def keep(self, work: Work, name: str) -> "asyncio.Task[None]":
        """Runs `work` until it returns or the task, which the caller holds, is cancelled."""
        return background(self._keep(work, _Loop(name, self._timing.retry_s)), name)

    def trouble(self) -> str:
        """The loops that are down now, with their errors; "" where all run."""
        return "; ".join(f"{name} ended by an error ({why})" for name, why in self._down.items())

    async def _keep(self, work: Work, loop: _Loop) -> None:
        try:
            while (fault := await self._run(work, loop)) is not None:
                self._ended(loop, fault)
                await asyncio.sleep(loop.wait_s)
                loop.wait_s = min(2 * loop.wait_s, self._timing.max_retry_s)
        finally:
            _ = self._down.pop(loop.name, None)

    async def _run(self, work: Work, loop: _Loop) -> BaseException | None:
        """The error that ended `work`; None where it returned."""
        task = asyncio.create_task(work(), name=loop.name)
        try:
            steady_s = self._timing.steady_s if loop.failure else None
            _ = await asyncio.wait([task], timeout=steady_s)
            if not task.done():
                self._recovered(loop)
                _ = await asyncio.wait([task])
        finally:
            if not task.done():
                await cancel([task])
        return asyncio.CancelledError() if task.cancelled() else task.exception()

    def _ended(self, loop: _Loop, fault: BaseException) -> None:
        cause, now = _cause(fault), time.monotonic()
        loop.failure = type(fault).__name__ + (f": {fault}" if str(fault) else "")
        self._down[loop.name] = loop.failure
        logged_at = loop.logged_at.get(cause)
        if logged_at is not None and now - logged_at < self._timing.failures_within_s:
            return
        loop.logged_at[cause] = now
        log.error("%s ended by an error", loop.name, exc_info=fault)
        text = f"{loop.name} ended by an error and begins again: {loop.failure}"
        _ = self._events.add("loop_ended", text, loop=loop.name)

    def _recovered(self, loop: _Loop) -> None:
        loop.failure, loop.wait_s = "", self._timing.retry_s
        _ = self._down.pop(loop.name, None)
        _ = self._events.add("loop_recovered", f"{loop.name} works again", loop=loop.name)


def _cause(fault: BaseException) -> str:
    """The type of error and the line that raised it; the text may contain a changing number."""
    frames = traceback.extract_tb(fault.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(fault).__name__} {at}"
