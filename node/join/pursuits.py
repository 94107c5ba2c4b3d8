"""Which join ports this node keeps an eye on: bounded, and forgotten when nobody answers there."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from ...placement.errors import PeerLost, Untrusted
from ..machine.tasks import Loops
from ..machine.timing import JoinTiming

MAX_ADDRESSES: Final = 128
MAX_FAILURES: Final = 40
"""In a row, about ten minutes: a node that comes back calls by itself."""

Approach = Callable[[str], Awaitable[float | None]]
"""One connection to a join port; returns the seconds until the next, None where none is needed.
Raises PeerLost and Untrusted, after which it is tried again, later each time."""


class Pursuits:
    """Approaches each address that it is told of until there is nothing to ask there."""

    def __init__(self, approach: Approach, loops: Loops, timing: JoinTiming) -> None:
        self._timing = timing
        self._approach = approach
        self._loops = loops
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._quiet: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def see(self, address: str) -> None:
        """A join port (host:port) that may be of another cluster; known ones are ignored."""
        now = time.monotonic()
        self._quiet = {each: until for each, until in self._quiet.items() if until > now}
        if address in self._tasks or address in self._quiet:
            return
        if len(self._tasks) >= MAX_ADDRESSES:
            worst = max(self._tasks, key=lambda each: self._failures.get(each, 0))
            if not self._failures.get(worst):
                return
            self.drop(worst)
        task = self._loops.keep(partial(self._pursue, address), f"asking {address}")
        self._tasks[address] = task
        task.add_done_callback(lambda done: self._ended(address, done))

    def drop(self, address: str) -> None:
        """Ends the pursuit; the address may be seen again."""
        if (task := self._tasks.pop(address, None)) is not None:
            _ = task.cancel()
        _ = self._failures.pop(address, None)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    async def _pursue(self, address: str) -> None:
        wait: float | None = self._timing.retry_s
        while wait is not None:
            try:
                wait = await self._approach(address)
                self._failures[address] = 0
            except (PeerLost, Untrusted):
                failures = self._failures.get(address, 0) + 1
                self._failures[address] = failures
                wait = min(self._timing.retry_s * 2**failures, self._timing.max_retry_s)
                if failures >= MAX_FAILURES:
                    break
            if wait is not None:
                await asyncio.sleep(wait)
        self._quiet[address] = time.monotonic() + self._timing.quiet_s
        while len(self._quiet) > MAX_ADDRESSES:
            del self._quiet[next(iter(self._quiet))]

    def _ended(self, address: str, task: "asyncio.Task[None]") -> None:
        """There was nothing more to ask, or the address was dropped."""
        if self._tasks.get(address) is task:
            self.drop(address)
