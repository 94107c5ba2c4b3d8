"""A pursuit that is ended as its connection comes about: it ends, and closing does not wait."""

import asyncio
import ssl
from typing import Any

import pytest

from exo_node.node.join.wire import connected
from exo_node.node.machine.timing import LOCAL


async def test_a_cancel_that_meets_the_connection_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both in one turn of the loop, as on a busy machine."""
    connecting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def opened(*_: Any, **__: Any) -> Any:
        return await connecting

    monkeypatch.setattr(asyncio, "open_connection", opened)

    async def pursue() -> None:
        context = ssl.create_default_context()
        async with connected("127.0.0.1:1", context, LOCAL.join):
            raise AssertionError("it goes on")

    task = asyncio.create_task(pursue())
    await asyncio.sleep(0.05)
    connecting.set_result((None, None))
    _ = task.cancel()  # before what waits for the connection was woken
    with pytest.raises(asyncio.CancelledError):
        await task
