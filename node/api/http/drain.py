"""A node that is about to stop: it refuses new work and waits for requests in progress."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from ....placement.errors import PeerLost
from ...machine.tasks import unless
from ...machine.timing import Timing

Value = TypeVar("Value")


class Drain:
    """Counts the requests that change something, and refuses new ones after `begin`.

    GET requests are always answered, so that a person can watch the drain.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._is_draining = False
        self._is_cut_off = asyncio.Event()
        self.running = 0

    def around(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware inside the guard, which turns the refusal into an answer."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
                await app(scope, receive, send)
                return
            if self._is_draining:
                raise PeerLost("this node is about to stop; ask another one, or try again")
            await self.attend(app(scope, receive, send))

        return counted

    async def attend(self, work: Awaitable[Value]) -> Value:
        """Runs what a stopping node waits for. Raises PeerLost if it is cut off."""
        self.running += 1
        try:
            return await unless(self._is_cut_off.wait(), work, _cut_off)
        finally:
            self.running -= 1

    def begin(self) -> None:
        """Refuses new work from now on."""
        self._is_draining = True

    def cut_off(self) -> None:
        """Ends every running request with an error that names the reason."""
        self._is_cut_off.set()

    async def drained(self, stages: Callable[[], int], progress: Callable[[], int]) -> bool:
        """Waits for all requests. False if none of them makes progress for `drain_s`.

        `stages` counts the requests on this node's stages. `progress` changes with every step of
        one of them or of this node's own answers.
        """
        clock = asyncio.get_running_loop().time
        last, since = progress(), clock()
        while self.running or stages():
            await asyncio.sleep(self._timing.tick_s)
            if (now := progress()) != last:
                last, since = now, clock()
            elif clock() - since >= self._timing.drain_s:
                return False
        return True


def _cut_off() -> PeerLost:
    return PeerLost(
        "this node stops, or starts anew with another cluster key, and waits no longer for this "
        "answer; ask another one, or try again"
    )
