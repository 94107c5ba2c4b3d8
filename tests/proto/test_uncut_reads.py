"""A wait for a message that ends early cancels no read, since gRPC would never free it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from exo_node.proto.uncut_reads import next_reply, requests_of


class Call:
    """A call whose message comes when `message` has a result."""

    def __init__(self) -> None:
        self.message: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cuts = 0
        self.is_ended = False

    async def read(self) -> str:
        try:
            return await asyncio.shield(self.message)
        except asyncio.CancelledError:
            self.cuts += not self.message.done()
            raise

    def cancel(self) -> None:
        self.is_ended = True
        self.message.set_exception(RuntimeError("the call has ended"))

    async def requests(self) -> AsyncIterator[str]:
        while True:
            yield await self.read()


def played(story: Callable[[Call], Awaitable[None]]) -> None:
    """Plays a story with a call. No error of a read is reported that nobody waited for."""
    reported = list[object]()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(context))
        await story(Call())
        _ = gc.collect()

    asyncio.run(run())
    assert reported == []


async def _ended_early(waiting: "asyncio.Task[str]") -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    _ = waiting.cancel()
    with suppress(asyncio.CancelledError):
        _ = await waiting
    assert waiting.cancelled()


def test_a_reply_that_takes_too_long_ends_its_call_and_not_its_read() -> None:
    async def story(call: Call) -> None:
        with pytest.raises(TimeoutError):
            _ = await next_reply(call, 0.01)
        assert call.is_ended and call.cuts == 0

    played(story)


def test_a_cancelled_wait_for_a_reply_ends_its_call_and_not_its_read() -> None:
    async def story(call: Call) -> None:
        await _ended_early(asyncio.create_task(next_reply(call)))
        assert call.is_ended and call.cuts == 0

    played(story)


def test_a_reply_leaves_its_call_open() -> None:
    async def story(call: Call) -> None:
        waiting = asyncio.create_task(next_reply(call, 60.0))
        await asyncio.sleep(0)
        call.message.set_result("a reply")
        assert await waiting == "a reply" and not call.is_ended

    played(story)


def test_a_cancelled_wait_for_a_request_leaves_its_read_to_the_end_of_the_call() -> None:
    async def story(call: Call) -> None:
        requests = requests_of(call.requests())
        await _ended_early(asyncio.create_task(anext(requests, "none")))
        assert not call.message.done() and call.cuts == 0
        call.cancel()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    played(story)
