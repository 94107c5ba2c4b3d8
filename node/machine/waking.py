"""Notices that this machine slept, or that this process was stopped.

Afterwards other nodes have closed their connections, addresses may be others, and what waits for a
timeout would wait for minutes.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final

_LOOK_EVERY_S: Final = 1.0
_SLEPT_S: Final = 30.0
"""Shorter pauses cut no connection of a cluster on a LAN; a busy machine has some of seconds."""


def seconds() -> float:
    """A clock that runs while the machine sleeps, and that cannot be set."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # it stands still on Linux only


class WakeWatch:
    """Calls `on_wake` with the seconds of each pause that was longer than half a minute."""

    def __init__(
        self, on_wake: Callable[[float], Awaitable[None]], clock: Callable[[], float] = seconds
    ) -> None:
        """`on_wake` waits for nothing: the watch does not look meanwhile."""
        self._on_wake = on_wake
        self._clock = clock

    async def run(self) -> None:
        before = self._clock()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            before, passed = (now := self._clock()), now - before
            if passed - _LOOK_EVERY_S >= _SLEPT_S:
                await self._on_wake(passed)
