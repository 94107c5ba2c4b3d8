"""A node that is about to stop: it refuses new work and lets what runs come to its end."""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ..placement.errors import PeerLost

DRAIN_S: Final = 30.0
_POLL_S: Final = 0.1


class Leaving:
    """Counts the requests that do something, and refuses them once `begin` was called.

    What only reads (GET) is answered to the end, so that a person can watch it.
    """

    def __init__(self) -> None:
        self._begun = False
        self.running = 0

    def around(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware inside the guard, which makes an answer of the refusal."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
                await app(scope, receive, send)
                return
            if self._begun:
                raise PeerLost("this node is about to stop; ask another one, or try again")
            self.running += 1
            try:
                await app(scope, receive, send)
            finally:
                self.running -= 1

        return counted

    def begin(self) -> None:
        """From now on new work is refused."""
        self._begun = True

    async def drained(self, stages: Callable[[], int], within_s: float = DRAIN_S) -> bool:
        """Whether everything ended in time; `stages` counts the requests on this node's stages."""
        try:
            async with asyncio.timeout(within_s):
                while self.running or stages():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True
