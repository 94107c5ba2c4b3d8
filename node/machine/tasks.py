"""Tasks that run beside everything else: those that end by an error say so, loops begin again."""

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from .events import EventLog
from .log import apart
from .timing import LoopTiming

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


def background(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    """Starts `work`, which has an end; the caller keeps the task and cancels it at the end.

    Nobody awaits such a task before that, so its error would be told only when it is collected.
    """
    task = asyncio.create_task(work, name=name, context=apart())
    task.add_done_callback(_tell)
    return task


def _tell(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.error("%s ended by an error", task.get_name(), exc_info=fault)


@dataclass(slots=True)
class _Loop:
    name: str
    wait_s: float
    failure: str = ""
    told: dict[str, float] = field(default_factory=dict[str, float])
    """By cause: when it was logged."""


class Loops:
    """The work of a node that has no end: what ends by an error begins again, ever later."""

    def __init__(self, events: EventLog, timing: LoopTiming) -> None:
        self._events = events
        self._timing = timing
        self._down: dict[str, str] = {}

    def keep(self, work: Work, name: str) -> "asyncio.Task[None]":
        """Runs `work` until it returns or the task, which the caller keeps, is cancelled."""
        return background(self._keep(work, _Loop(name, self._timing.first_wait_s)), name)

    def trouble(self) -> str:
        """Which loops are down now, and why; "" where all run."""
        return "; ".join(f"{name} ended by an error ({why})" for name, why in self._down.items())

    async def _keep(self, work: Work, loop: _Loop) -> None:
        try:
            while (fault := await self._run(work, loop)) is not None:
                self._ended(loop, fault)
                await asyncio.sleep(loop.wait_s)
                loop.wait_s = min(2 * loop.wait_s, self._timing.max_wait_s)
        finally:
            _ = self._down.pop(loop.name, None)

    async def _run(self, work: Work, loop: _Loop) -> BaseException | None:
        """What ended `work`; None where it is done."""
        task = asyncio.create_task(work(), name=loop.name)
        try:
            steady_s = self._timing.steady_s if loop.failure else None
            _ = await asyncio.wait([task], timeout=steady_s)
            if not task.done():
                self._recovered(loop)
                _ = await asyncio.wait([task])
        finally:
            if not task.done():
                _ = task.cancel()
                _ = await asyncio.gather(task, return_exceptions=True)
        return asyncio.CancelledError() if task.cancelled() else task.exception()

    def _ended(self, loop: _Loop, fault: BaseException) -> None:
        cause, now = _cause(fault), time.monotonic()
        loop.failure = type(fault).__name__ + (f": {fault}" if str(fault) else "")
        self._down[loop.name] = loop.failure
        told_at = loop.told.get(cause)
        if told_at is not None and now - told_at < self._timing.say_again_s:
            return
        loop.told[cause] = now
        log.error("%s ended by an error", loop.name, exc_info=fault)
        text = f"{loop.name} ended by an error and begins again: {loop.failure}"
        _ = self._events.add("loop_ended", text, loop=loop.name)

    def _recovered(self, loop: _Loop) -> None:
        loop.failure, loop.wait_s = "", self._timing.first_wait_s
        _ = self._down.pop(loop.name, None)
        _ = self._events.add("loop_recovered", f"{loop.name} works again", loop=loop.name)


def _cause(fault: BaseException) -> str:
    """The kind of error and where it was raised: the text may have a number that changes."""
    frames = traceback.extract_tb(fault.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(fault).__name__} {at}"
