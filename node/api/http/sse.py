"""Server-sent events: their framing, and a source of events that ends with its client."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...machine.tasks import unless
from .strict_json import encode

DONE: Final = b"data: [DONE]\n\n"

_LOG: Final = logging.getLogger(__name__)

Event = TypeVar("Event")


def data(value: Any) -> bytes:
    """One event. JSON text has no raw line break, so one `data:` line holds it."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data(value)


def comment(text: str) -> bytes:
    """A line that clients skip: progress for a person, and a sign of life for proxies."""
    return f": {' '.join(text.split())}\n\n".encode()


class EventStream(Response):
    """Sends each frame at once; `await send` is the backpressure on their source."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes], media_type: str = media_type) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._frames):
            await send(head)
            try:
                async for frame in self._frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except ClientDisconnect:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(slots=True)
class Silence:
    """The time since a stream last carried data that its clients count as activity."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    _since: float = 0.0

    def __post_init__(self) -> None:
        self.end()

    def end(self) -> None:
        self._since = self.clock()

    @property
    def left_s(self) -> float:
        """Seconds until a heartbeat is due; not positive once it is."""
        return self._since + self.limit_s - self.clock()


async def attended(
    events: AsyncGenerator[Event], receive: Receive, silence: Silence
) -> AsyncGenerator[Event | None]:
    """`events`, with None whenever `silence` has reached its limit, which ends it.

    The consumer ends `silence` when it sends data, since an event need not become data. Raises
    ClientDisconnect as soon as the client has disconnected. `events` is closed at the end in every
    case; a pending step of it is cancelled first.
    """
    disconnect = asyncio.ensure_future(disconnection(receive))
    step: asyncio.Future[tuple[Event] | None] | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(_next(events))
            left_s = max(0.0, silence.left_s)
            await asyncio.wait(
                (disconnect, step), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if disconnect.done():
                raise ClientDisconnect
            if silence.left_s <= 0:
                silence.end()
                yield None
            if not step.done():
                continue
            # `step` is cleared before its error is raised: below, only pending steps are cancelled.
            completed, step = step, None
            event = completed.result()
            if event is None:
                return
            yield event[0]
    finally:
        await _cancelled(disconnect)
        if step is not None:
            await _cancelled(step)
        await events.aclose()


async def while_attended(work: Coroutine[Any, Any, Event], receive: Receive) -> Event:
    """The outcome of the work, which is cancelled once the client has disconnected. Raises
    ClientDisconnect then."""
    return await unless(disconnection(receive), work, ClientDisconnect)


async def _next(events: AsyncGenerator[Event]) -> tuple[Event] | None:
    try:
        return (await anext(events),)
    except StopAsyncIteration:
        return None


async def disconnection(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancels and waits: a generator cannot be closed while a step of it runs."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (fault := task.exception()) is not None:
        _LOG.warning("an answer failed when its client had gone: %r", fault)
