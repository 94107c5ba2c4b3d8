"""The event loop of `async def` tests, and how they wait."""

import asyncio
import traceback
from collections.abc import Callable
from typing import Any


class TestLoop(asyncio.SelectorEventLoop):
    """Ignores late gRPC events of loops that earlier tests closed.

    gRPC has one queue of events for all loops of a process.
    """

    __test__ = False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not is_of_a_closed_loop(context.get("exception")):
            super().call_exception_handler(context)


def is_of_a_closed_loop(fault: object) -> bool:
    if not isinstance(fault, RuntimeError) or str(fault) != "Event loop is closed":
        return False
    frames = traceback.extract_tb(fault.__traceback__)
    return any(frame.name.endswith("PollerCompletionQueue._handle_events") for frame in frames)


async def until(holds: Callable[[], object], *, look_s: float = 0.01) -> None:
    """Looks every `look_s` seconds, for a minute at most."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(look_s)
