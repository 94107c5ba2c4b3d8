"""Wakes whoever waits for news of the cluster."""

import asyncio
import contextlib


class News:
    """An event that is set and replaced: who waits next waits for the next news."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wakes everybody who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, within_s: float | None = None) -> None:
        """Returns when there is news, or after so long."""
        event = self._event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                _ = await event.wait()
