"""A call that is cancelled at the moment when its connection is established."""

import asyncio
import ssl
from typing import Any

import pytest

from exo_node.node.join.wire import connect
from exo_node.node.machine.timing import LOCAL


async def test_a_cancel_that_comes_with_the_connection_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both in one turn of the loop, as on a busy machine."""
    connecting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def open_connection(*_: Any, **__: Any) -> Any:
        return await connecting

    monkeypatch.setattr(asyncio, "open_connection", open_connection)

    async def call() -> None:
        context = ssl.create_default_context()
        async with connect("127.0.0.1:1", context, LOCAL):
            raise AssertionError("the cancel was lost")

    task = asyncio.create_task(call())
    await asyncio.sleep(0.05)
    connecting.set_result((None, None))
    _ = task.cancel()  # before the task that awaits the connection runs
    with pytest.raises(asyncio.CancelledError):
        await task
