"""Notices that this machine slept, or that this process was stopped.

Afterwards other nodes have closed their connections, addresses may be others, and what waits for a
timeout would wait for minutes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

_LOOK_EVERY_S: Final = 1.0
_SLEPT_S: Final = 30.0
"""Shorter pauses cut no connection of a cluster on a LAN; a busy machine has some of seconds."""


class WakeWatch:
    """Calls `on_wake` with the seconds of each pause that was longer than half a minute."""

    def __init__(
        self,
        on_wake: Callable[[float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` stands still while the machine sleeps, on macOS and Linux, and goes on while the
        process is stopped. `wall` goes on in both, and may be set by hand."""
        self._on_wake = on_wake
        self._clocks = (clock, wall)

    async def run(self) -> None:
        """Runs until cancelled."""
        before = self._now()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = self._now()
            passed = [new - old for new, old in zip(now, before, strict=True)]
            before = now
            if max(passed) - _LOOK_EVERY_S >= _SLEPT_S:
                await self._on_wake(max(passed))
                before = self._now()

    def _now(self) -> list[float]:
        return [clock() for clock in self._clocks]
