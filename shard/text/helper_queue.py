"""Requests to a helper process, one at a time, and the replacement of a process that ended."""

import asyncio
from pathlib import Path
from typing import Any

from ...placement.errors import LoadFailed
from .helper import Frame
from .helper_process import (
    HelperLimits,
    HelperLost,
    HelperProcess,
    blamed_on_messages,
    started_helper,
)


class HelperQueue:
    """One process and its replacements; one request at a time."""

    def __init__(self, folder: "asyncio.Future[Path]", limits: HelperLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[HelperProcess] | None = None
        self._runs: set[asyncio.Task[Frame]] = set()

    def start(self) -> "asyncio.Task[HelperProcess]":
        if self._starting is None or _has_ended(self._starting):
            self._starting = asyncio.create_task(started_helper(self._folder, self._limits))
            self._starting.add_done_callback(_retrieve_exception)
        return self._starting

    @property
    def pid(self) -> int:
        """0 while there is no process that has opened the tokenizer."""
        starting = self._starting
        if starting is None or not starting.done() or _has_ended(starting):
            return 0
        return starting.result().process.pid

    async def longest_token(self) -> int:
        return (await asyncio.shield(self.start())).longest_token

    async def ask(self, kind: bytes, body: bytes) -> Frame:
        """The helper's answer. Raises what it refuses, InvalidRequest for a limit, and LoadFailed.

        Cancelling it ends the work soon.
        """
        left = asyncio.Event()
        run = asyncio.create_task(self._in_turn(kind, body, left))
        self._runs.add(run)
        run.add_done_callback(self._discard)
        try:
            return await asyncio.shield(run)
        finally:
            left.set()

    def _discard(self, run: "asyncio.Task[Frame]") -> None:
        self._runs.discard(run)
        _retrieve_exception(run)

    async def _in_turn(self, kind: bytes, body: bytes, left: asyncio.Event) -> Frame:
        async with self._turn:
            try:
                return await self._ask_once(kind, body, left)
            except HelperLost:
                pass
            try:
                return await self._ask_once(kind, body, left)
            except HelperLost as fault:
                if fault.crashed:
                    raise blamed_on_messages(fault.ending) from fault
                raise LoadFailed(
                    f"the tokenizer's process {fault.ending}, and so did the one before it; "
                    "try again"
                ) from fault

    async def _ask_once(self, kind: bytes, body: bytes, left: asyncio.Event) -> Frame:
        if left.is_set():
            raise asyncio.CancelledError
        helper = await asyncio.shield(self.start())
        try:
            return await helper.ask(kind, body, left)
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
    """Those who await the task get its exception; asyncio need not warn of it again."""
    if not task.cancelled():
        _ = task.exception()
