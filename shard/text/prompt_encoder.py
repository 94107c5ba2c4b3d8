"""Messages to ids in processes of their own, with limits: the runner's side of `text_helper`."""

import asyncio
import contextlib
import json
import logging
import os
import struct
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from ...placement.errors import ExoNodeError, InvalidRequest, LoadFailed, from_code
from .grammars import GrammarSpec
from .helper import (
    CALLS,
    DECODE,
    ENCODE,
    ENCODE_TEXT,
    FAULT,
    GRAMMAR,
    HEAD,
    IDS,
    OPEN,
    OPENED,
    Frame,
    frame,
    over_memory,
)
from .messages import check_length, too_long
from .tool_calls import Call

log = logging.getLogger(__name__)

LONG_BYTES: Final = 128 << 10
"""Requests beyond this have a helper of their own, so that they keep only each other waiting."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
}


@dataclass(frozen=True, slots=True)
class HelperLimits:
    """What one request may take. CPU time, so that a busy machine refuses nothing that is fine."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    left_s: float = 0.2
    """CPU time that a request may still take once its client has left."""
    memory_bytes: int = 512 << 20
    start_s: float = 120.0
    look_s: float = 0.05


class PromptEncoder:
    """Ids of chats. A request that goes beyond a limit is refused alone, and its helper replaced.

    `start` spawns the first helper and returns at once; `open` names the checkpoint, when it has
    been checked. A second helper, for long requests, is started by the first of them.
    """

    def __init__(self, limits: HelperLimits | None = None) -> None:
        self._limits = limits or HelperLimits()
        self._longest_token = 0
        self._folder: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._short = _Helper(self._folder, self._limits)
        self._long = _Helper(self._folder, self._limits)

    def start(self) -> None:
        self._short.start()

    def open(self, folder: Path) -> None:
        self._folder.set_result(folder)

    @property
    def pids(self) -> list[int]:
        """Of helpers that run."""
        return [pid for helper in (self._short, self._long) if (pid := helper.pid)]

    async def encode(self, messages: str, context_length: int) -> list[int]:
        """`messages` is the JSON of `messages.chat_json`. Cancelling it ends the work soon.

        Raises ContextLengthExceeded for text that the context could not hold whatever its tokens,
        and InvalidRequest for what the template, the tokenizer or a limit refuses.
        """
        limit = await self._limit(context_length)
        await asyncio.to_thread(check_length, messages, limit)
        return await self._ids(ENCODE, messages, limit)

    async def encode_text(self, text: str, context_length: int) -> list[int]:
        """Of a whole prompt, without a template; as `encode`."""
        limit = await self._limit(context_length)
        if (size := len(text.encode(errors="replace"))) > limit:
            raise too_long(size, limit)
        return await self._ids(ENCODE_TEXT, text, limit)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids. Raises InvalidRequest."""
        _, body = await self._short.ask(DECODE, array("I", ids).tobytes())
        return body.decode()

    async def calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call] | None:
        """The calls of tools in a text; None where it holds none, or a limit ended the search."""
        asked = json.dumps({"text": text, "tools": list(tools)}).encode()
        try:
            _, body = await self._helper(len(asked)).ask(CALLS, asked)
        except InvalidRequest as fault:
            log.warning("what looked like a call of a tool is passed on as text: %s", fault.code)
            return None
        found = json.loads(body)
        return None if found is None else [Call(name, arguments) for name, arguments in found]

    async def check(self, spec: GrammarSpec) -> None:
        """Raises InvalidRequest where it cannot be compiled within the limits."""
        asked = json.dumps([spec.kind, spec.text, spec.field]).encode()
        try:
            _ = await self._helper(len(asked)).ask(GRAMMAR, asked)
        except InvalidRequest as fault:
            if fault.param == spec.field:
                raise
            raise InvalidRequest(
                f"'{spec.field}' takes more time or memory to compile than a request may have; "
                "make it smaller",
                param=spec.field,
            ) from fault

    async def _limit(self, context_length: int) -> int:
        if not self._longest_token:
            self._longest_token = await self._short.longest_token()
        return context_length * self._longest_token

    def _helper(self, size: int) -> "_Helper":
        return self._long if size > LONG_BYTES else self._short

    async def _ids(self, kind: bytes, text: str, limit: int) -> list[int]:
        body = limit.to_bytes(8, "big") + text.encode()
        answer, ids = await self._helper(len(text)).ask(kind, body)
        assert answer == IDS
        return array("I", ids).tolist()

    async def close(self) -> None:
        _ = self._folder.cancel()
        _ = await asyncio.gather(self._short.close(), self._long.close())


class _Helper:
    """One process and its replacements; one request at a time."""

    def __init__(self, folder: "asyncio.Future[Path]", limits: HelperLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[_Child] | None = None
        self._runs: set[asyncio.Task[Frame]] = set()

    def start(self) -> "asyncio.Task[_Child]":
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(_started(self._folder, self._limits))
            self._starting.add_done_callback(_seen)
        return self._starting

    @property
    def pid(self) -> int:
        starting = self._starting
        if starting is None or not starting.done() or _is_over(starting):
            return 0
        return starting.result().process.pid

    async def longest_token(self) -> int:
        return (await asyncio.shield(self.start())).longest_token

    async def ask(self, kind: bytes, body: bytes) -> Frame:
        """The helper's answer. Raises what it refuses, and InvalidRequest for a limit."""
        left = asyncio.Event()
        run = asyncio.create_task(self._in_turn(kind, body, left))
        self._runs.add(run)
        run.add_done_callback(self._ended)
        try:
            return await asyncio.shield(run)
        finally:
            left.set()

    def _ended(self, run: "asyncio.Task[Frame]") -> None:
        self._runs.discard(run)
        _seen(run)

    async def _in_turn(self, kind: bytes, body: bytes, left: asyncio.Event) -> Frame:
        async with self._turn:
            if left.is_set():
                raise asyncio.CancelledError
            child = await asyncio.shield(self.start())
            try:
                return await child.ask(kind, body, left)
            finally:
                if child.is_over:
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
        if self._starting.done() and not _is_over(self._starting):
            await self._starting.result().end()


def _is_over(starting: "asyncio.Task[_Child]") -> bool:
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().is_over


def _seen(task: "asyncio.Task[Any]") -> None:
    """What it raised is told to those who await it; asyncio need not tell of it again."""
    if not task.cancelled():
        _ = task.exception()


async def _started(folder: "asyncio.Future[Path]", limits: HelperLimits) -> "_Child":
    """Raises LoadFailed, and what loading the tokenizer raises."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "exo_node.shard.text.helper", str(limits.memory_bytes)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,  # until it has opened the tokenizer: from then on a crash may quote a prompt
        # The parent's modules may have come by PYTHONPATH, which a child does not see otherwise.
        env=_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))},
    )
    child = _Child(process, limits)
    try:
        async with asyncio.timeout(limits.start_s):
            _ = await child.receive()
            child.send(frame(OPEN, os.fsencode(await asyncio.shield(folder))))
            kind, body = await child.receive()
    except EOFError as fault:
        raise LoadFailed(f"the tokenizer's process {await child.first_ending()}") from fault
    except TimeoutError as fault:
        await child.end()
        why = f"did not start within {limits.start_s:g} s"
        raise LoadFailed(f"the tokenizer's process {why}") from fault
    except BaseException:  # a cancelled load must not leave its child behind either
        await child.end()
        raise
    if kind != OPENED:
        await child.end()
        raise _told(body)
    child.opened(struct.unpack(">Q", body)[0])
    return child


def _told(body: bytes) -> ExoNodeError:
    code, param, message = body.decode(errors="replace").split("\0", 2)
    return from_code(code, message, param or None)


class _Child:
    """A helper that was started."""

    def __init__(self, process: Process, limits: HelperLimits) -> None:
        self.process = process
        self.longest_token = 0
        self._limits = limits
        self._usage = psutil.Process(process.pid)
        self._base = 0
        assert process.stderr is not None
        self._said = asyncio.create_task(process.stderr.read())  # to its end, which closes the pipe

    def opened(self, longest_token: int) -> None:
        self.longest_token = longest_token
        self._base = self._usage.memory_info().rss

    @property
    def is_over(self) -> bool:
        assert self.process.stdout is not None
        return self.process.returncode is not None or self.process.stdout.at_eof()

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    async def receive(self) -> tuple[bytes, bytes]:
        """Raises EOFError where the process is gone."""
        assert self.process.stdout is not None
        kind, size = HEAD.unpack(await self.process.stdout.readexactly(HEAD.size))
        return kind, await self.process.stdout.readexactly(size)

    async def ask(self, asked: bytes, what: bytes, left: asyncio.Event) -> Frame:
        self.send(frame(asked, what))
        answer = asyncio.create_task(self.receive())
        try:
            refusal = await self._until_done(answer, left)
            if refusal is not None:
                raise refusal
            kind, body = await answer
        except EOFError as fault:
            why = await self.ending()
            raise InvalidRequest(
                f"the model's tokenizer or chat template {why} on these messages; shorten them, or "
                "correct the template",
                param="messages",
            ) from fault
        finally:
            if not answer.done():
                _ = answer.cancel()
                await self.end()
        if kind == FAULT:
            raise _told(body)
        return kind, body

    async def _until_done(
        self, answer: "asyncio.Task[tuple[bytes, bytes]]", left: asyncio.Event
    ) -> ExoNodeError | None:
        """The limit that was passed, None where the answer, or the process's end, came first."""
        limits, loop = self._limits, asyncio.get_running_loop()
        began, cpu_before, budget = loop.time(), self._cpu_s(), limits.cpu_s
        while not (await asyncio.wait([answer], timeout=limits.look_s))[0]:
            used, now = self._cpu_s() - cpu_before, loop.time()
            if left.is_set():
                budget = min(budget, used + limits.left_s) if budget == limits.cpu_s else budget
            if used > budget or now - began > limits.wall_s:
                return InvalidRequest(
                    f"the model's chat template and tokenizer took more than {limits.cpu_s:g} s "
                    "for these messages; shorten them, above all text without spaces, or correct "
                    "the template",
                    param="messages",
                )
            if self._resident() > self._base + limits.memory_bytes:
                return over_memory()
        return None

    def _cpu_s(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = self._usage.cpu_times()
            return times.user + times.system
        return 0.0

    def _resident(self) -> int:
        with contextlib.suppress(psutil.Error):
            return int(self._usage.memory_info().rss)
        return 0

    async def ending(self) -> str:
        """How it ended; waits until it has."""
        code = await self.process.wait()
        return f"ended by signal {-code}" if code < 0 else f"exited with status {code}"

    async def first_ending(self) -> str:
        """As `ending`, and why, of a process that has opened nothing yet."""
        said = (await self._said).decode(errors="replace").strip()
        ending = await self.ending()
        return f"{ending}: {said.splitlines()[-1][:500]}" if said else ending

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        _ = await self.process.wait()
        _ = await asyncio.wait([self._said])
