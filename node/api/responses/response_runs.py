"""The stored answers of this node: those that are being given, and where the others are."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Final

from starlette.requests import Request
from starlette.types import Receive

from ....placement.errors import QueueFull, ResponsesUnavailable
from ...chat.requests import Event
from ...responses.store import NewResponse, ResponseStore
from ..http.drain import Drain
from ..http.sse import Silence, attended
from ..shared.answering import STATUS_HEARTBEATS, unfinished
from .response_renderer import ResponseRenderer
from .response_run import ResponseRun

MAX_RUNS: Final = 32
"""The limit of a client's answers in the background, which no connection bounds."""
NO_RUNS: Final = "this node stores no responses (EXO_RESPONSES_GB=0)"


class ResponseRuns:
    """Answers by the id of their response."""

    def __init__(self, store: ResponseStore, leaving: Drain, retry_s: float) -> None:
        """`leaving`: the node waits for them before it stops. `retry_s`: seconds until one in the
        background asks again for a place in its model's full queue."""
        self.store = store
        self._leaving = leaving
        self._retry_s = retry_s
        self._runs: dict[str, ResponseRun] = {}

    async def start(
        self,
        request: NewResponse,
        renderer: ResponseRenderer,
        stream: Callable[[], AsyncGenerator[Event]],
    ) -> ResponseRun:
        """Starts an answer, of whose events `stream` makes a new generator each time.

        Raises QueueFull for too many in the background, ResponsesUnavailable and
        PreviousResponseNotFound for one of those that cannot be stored.
        """
        run = ResponseRun(request, renderer, self.store, self._leaving)
        if request.is_background:
            self._make_room(request.owner)
        self._runs[run.id] = run
        has_started = False
        try:
            if request.is_background:
                await run.begin()
            events = _queued(stream, self._retry_s) if request.is_background else stream()
            run.start(events).add_done_callback(lambda _: self._ended(run))
            has_started = True
        finally:
            if not has_started:
                _ = self._runs.pop(run.id, None)
        return run

    def get(self, id: str, owner: str) -> ResponseRun | None:
        """The owner's answer that is being given, or that could not be stored."""
        run = self._runs.get(id)
        return run if run is not None and run.request.owner == owner else None

    async def delete(self, id: str, owner: str) -> None:
        """Ends the answer and deletes the response. Raises ResponseNotFound."""
        if (run := self.get(id, owner)) is not None:
            run.cancel()
            await run.ended()
            _ = self._runs.pop(id, None)
        await self.store.delete(id, owner)

    async def expire(self, every_s: float) -> None:
        """Deletes responses that become too old, for ever."""
        while True:
            with suppress(ResponsesUnavailable):  # the next request that needs them says so
                await self.store.expire()
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        """Ends all answers, which are stored as failed, and closes the file."""
        self._leaving.cut_off()
        _ = await asyncio.gather(*(run.ended() for run in self._runs.values()))
        await self.store.close()

    def _ended(self, run: ResponseRun) -> None:
        if not (run.is_lost and run.request.is_background):
            _ = self._runs.pop(run.id, None)

    def _make_room(self, owner: str) -> None:
        """Forgets the owner's oldest answer that could not be stored, if there are many."""
        owned = (run for run in self._runs.values() if run.request.owner == owner)
        runs = [run for run in owned if run.request.is_background]
        lost = [run for run in runs if run.is_lost]
        if len(runs) < MAX_RUNS:
            return
        if not lost:
            raise QueueFull(
                f"{MAX_RUNS} answers of yours run in the background already; wait until one has "
                "ended, or cancel one"
            )
        _ = self._runs.pop(lost[0].id, None)


async def _queued(
    stream: Callable[[], AsyncGenerator[Event]], retry_s: float
) -> AsyncGenerator[Event]:
    """The events of an answer that waits while its model's queue is full: its client was told that
    it is queued, and is not there to try again."""
    while True:
        try:
            async with aclosing(stream()) as events:
                async for event in events:
                    yield event
            return
        except QueueFull:
            await asyncio.sleep(retry_s)


def owner_of(request: Request) -> str:
    """The owner of what a client stores: its API token, or everyone without one.

    The salt identifies the token and reveals neither it nor its digest.
    """
    salt: bytes = request.state.cache_salt
    return salt.hex()


async def read_run(
    run: ResponseRun, receive: Receive, silence: Silence, after: int, *, holds: bool = False
) -> AsyncGenerator[bytes]:
    """The frames of a run after a number, for one client, with signs of life between them.

    `holds`: the run ends with this client. Raises ClientDisconnect, and the run's error if that
    came before its first frame.
    """
    number, beats = after, 0
    try:
        async with aclosing(attended(run.log.follow(after), receive, silence)) as frames:
            async for frame in frames:
                if frame is not None:
                    silence.end()
                    number += 1
                    yield frame
                elif run.log.last >= 0:
                    yield run.sign_of_life(number)
                elif (beats := beats + 1) == STATUS_HEARTBEATS:
                    await run.begin()
        if run.log.last < 0:
            raise run.fault or unfinished()
    finally:
        if holds:
            run.cancel()
