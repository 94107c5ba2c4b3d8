"""Reads of gRPC streams that are not cancelled, though whoever waits for them may be.

gRPC never frees a read whose awaiter is cancelled, nor a message that has come for it, of up to
3 MiB (grpc/grpc#43360). The end of its call ends a read as well, and frees both.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

Message = TypeVar("Message")


async def next_reply(call: Any, within_s: float | None = None) -> Any:
    """The next message of a call, or gRPC's EOF; a wait that ends early ends the call.

    Raises TimeoutError after `within_s`, and what the call raises.
    """
    reading = _as_task(call.read())
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.shield(reading)
    finally:
        if not reading.done():
            _ = call.cancel()
            _ = await asyncio.wait([reading])


async def requests_of(caller: AsyncIterator[Message]) -> AsyncGenerator[Message]:
    """A caller's messages; a wait that ends early leaves the read to the end of the call."""
    while True:
        reading = _as_task(anext(caller, None))
        if (message := await asyncio.shield(reading)) is None:
            return
        yield message


def _as_task(read: Awaitable[Message]) -> asyncio.Future[Message]:
    """A read that runs by itself. If nobody waits for it any more, its error is of no interest."""
    reading = asyncio.ensure_future(read)
    reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return reading
