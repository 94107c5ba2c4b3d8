"""Calls that note the reads whose awaiter is cancelled: gRPC frees none of them."""

import asyncio
from types import SimpleNamespace
from typing import Any


def noting_cut_reads(stub: Any, method: str, cut: list[object]) -> Any:
    """The class of a stub with one method, whose calls add to `cut`."""

    class Call:
        def __init__(self, call: Any) -> None:
            self._call = call

        def __getattr__(self, name: str) -> Any:
            return getattr(self._call, name)

        async def read(self) -> Any:
            try:
                return await self._call.read()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                cut.extend([task] * bool(task and task.cancelling()))
                raise

    def of(channel: Any) -> Any:
        own = getattr(stub(channel), method)

        def call(*request: Any) -> Any:
            return Call(own(*request))

        return SimpleNamespace(**{method: call})

    return of
