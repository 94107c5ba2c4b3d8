"""Queues requests to a helper process and replaces a process that ended."""

import asyncio
from pathlib import Path
from typing import Any

from ...placement.errors import LoadFailed
from .helper import Kind, Packet
from .helper_process import (
    HelperLimits,
    HelperLost,
    HelperProcess,
    again_if_lost,
    blamed_on_prompt,
    start_helper,
)


class HelperQueue:
    """A helper process and its replacements, for one request at a time."""

    def __init__(self, folder: "asyncio.Future[Path]", limits: HelperLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[HelperProcess] | None = None
        self._runs: set[asyncio.Task[Packet]] = set()

    def start(self) -> "asyncio.Task[HelperProcess]":
        if self._starting is None or _has_ended(self._starting):
            self._starting = asyncio.create_task(start_helper(self._folder, self._limits))
            self._starting.add_done_callback(_retrieve_exception)
        return self._starting

    @property
    def pid(self) -> int:
        """The process's id; 0 while none has opened the tokenizer."""
        starting = self._starting
        if starting is None or not starting.done() or _has_ended(starting):
            return 0
        return starting.result().process.pid

    async def longest_token(self) -> int:
        return (await asyncio.shield(self.start())).longest_token

    async def ask(self, kind: Kind, data: bytes = b"", **fields: Any) -> Packet:
        """The helper's answer. Raises its errors, InvalidRequest for a limit, and LoadFailed.

        Cancelling it soon ends the work.
        """
        disconnected = asyncio.Event()
        run = asyncio.create_task(self._in_turn(Packet(kind, fields, data), disconnected))
        self._runs.add(run)
        run.add_done_callback(self._discard)
        try:
            return await asyncio.shield(run)
        finally:
            disconnected.set()

    def _discard(self, run: "asyncio.Task[Packet]") -> None:
        self._runs.discard(run)
        _retrieve_exception(run)

    async def _in_turn(self, request: Packet, disconnected: asyncio.Event) -> Packet:
        async with self._turn:
            try:
                return await again_if_lost(lambda: self._ask_once(request, disconnected))
            except HelperLost as fault:
                if fault.crashed:
                    raise blamed_on_prompt(fault.ending) from fault
                raise LoadFailed(
                    f"the tokenizer's process {fault.ending}, and so did the one before it; "
                    "try again"
                ) from fault

    async def _ask_once(self, request: Packet, disconnected: asyncio.Event) -> Packet:
        if disconnected.is_set():
            raise asyncio.CancelledError
        helper = await asyncio.shield(self.start())
        try:
            return await helper.ask(request, disconnected)
        finally:
            if helper.has_ended:
                _ = self.start()

    async def close(self) -> None:
        for run in self._runs:
            _ = run.cancel()
        if self._starting is None:
            return
        if not self._starting.done():
            # It ends with its pipes; asyncio may wait for a process that it only just started.
            _ = self._starting.cancel()
            _ = await asyncio.wait([self._starting], timeout=1.0)
        if self._starting.done() and not _has_ended(self._starting):
            await self._starting.result().end()


def _has_ended(starting: "asyncio.Task[HelperProcess]") -> bool:
    if not starting.done():
        return False
    failed = starting.cancelled() or starting.exception() is not None
    return failed or starting.result().has_ended


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Marks the task's exception as seen: its awaiters get it, and asyncio need not warn."""
    if not task.cancelled():
        _ = task.exception()
