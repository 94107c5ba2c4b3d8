"""A node that is about to stop: it refuses new work and lets what runs come to its end."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from ...placement.errors import PeerLost
from ..machine.timing import ServingTiming


class Drain:
    """Counts the requests that do something, and refuses them once `begin` was called.

    What only reads (GET) is answered to the end, so that a person can watch it.
    """

    def __init__(self, timing: ServingTiming) -> None:
        self._timing = timing
        self._begun = False
        self._over = asyncio.Event()
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
                await self._until_over(app(scope, receive, send))
            finally:
                self.running -= 1

        return counted

    def begin(self) -> None:
        """From now on new work is refused."""
        self._begun = True

    def cut_off(self) -> None:
        """What still runs ends here, each request with an error that says why."""
        self._over.set()

    async def drained(self, stages: Callable[[], int], progress: Callable[[], int]) -> bool:
        """Whether everything ended, however long that takes while something gets on.

        `stages` counts the requests on this node's stages. `progress` changes with every step that
        one of them, or of this node's own answers, makes: without any for `drain_s` this is False.
        """
        clock = asyncio.get_running_loop().time
        known, since = progress(), clock()
        while self.running or stages():
            await asyncio.sleep(self._timing.drain_poll_s)
            if (now := progress()) != known:
                known, since = now, clock()
            elif clock() - since >= self._timing.drain_s:
                return False
        return True

    async def _until_over(self, request: Awaitable[None]) -> None:
        """Raises PeerLost where it is cut off."""
        work, over = asyncio.ensure_future(request), asyncio.ensure_future(self._over.wait())
        try:
            _ = await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise PeerLost(
                    "this node stops, or starts anew with another cluster key, and waits no longer "
                    "for this answer; ask another one, or try again"
                )
            work.result()
        finally:
            for task in (work, over):
                _ = task.cancel()
            _ = await asyncio.gather(work, over, return_exceptions=True)
