"""The parent's side of one helper process, which it ends when a request exceeds a limit."""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import psutil

from ...placement.errors import PROMPT, ExoNodeError, InvalidRequest, LoadFailed, from_code
from .grammars.grammar import GRAMMAR_BYTES
from .helper import HEAD, Kind, Packet, over_memory

T = TypeVar("T")

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
}
_LIMIT_SIGNALS: Final = frozenset((signal.SIGXCPU, signal.SIGABRT))
"""Signals of a limit of the process: CPU time, or memory, at which libraries abort."""
_CRASH_SIGNALS: Final = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
)
"""Signals of a crash in the process's own computation."""
_BUSY: Final = frozenset((psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING))
"""States in which a process waits for a processor or a disk: it is slow and does not hang."""
_MIN_LOOKS: Final = 10
"""Fewer looks without CPU time between them prove no hang."""
_PREPARATIONS: Final[Mapping[Kind, Kind]] = {"grammar": "table", "image": "images"}
"""Work of seconds that is done once, and must not count for the first request that needs it."""
_BACKSTOP_S: Final = 3
"""CPU seconds after a limit until the helper ends itself, if its runner hangs."""


@dataclass(frozen=True, slots=True)
class HelperLimits:
    """Limits of one request. CPU time, so that a busy machine does not refuse valid requests."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    grace_s: float = 0.2
    """CPU time that a request may still take after its client disconnected."""
    memory_bytes: int = 512 << 20
    start_s: float = 120.0
    look_s: float = 0.05
    idle_s: float = 1.0
    """Seconds without CPU time after which a helper with an open request counts as hung."""
    start_idle_s: float = 5.0
    """The same during its start, when it reads many files."""
    image_cpu_s: float = 8.0
    """CPU time of one image."""
    images_cpu_s: float = 32.0
    """CPU time after which no further image of a request is begun."""

    def for_kind(self, kind: Kind) -> "HelperLimits":
        match kind:
            case "table" | "images":  # of the checkpoint and of libraries, whose sizes are limited
                return replace(self, cpu_s=60.0, wall_s=self.start_s, memory_bytes=2 << 30)
            case "image":
                return replace(self, cpu_s=self.image_cpu_s, memory_bytes=1 << 30)
            case "grammar":
                return replace(self, memory_bytes=GRAMMAR_BYTES)
            case _:
                return self


class HelperLost(Exception):
    """A helper hung or ended, but not by a limit: another one may answer the request.

    `crashed`: its own computation ended it.
    """

    def __init__(self, ending: str, *, crashed: bool = False) -> None:
        super().__init__(ending)
        self.ending = ending
        self.crashed = crashed


class HelperProcess:
    """A process that answers one request at a time. `start_helper` makes one."""

    def __init__(self, process: Process, limits: HelperLimits) -> None:
        self.process = process
        self.longest_token = 0
        self._limits = limits
        self._usage = psutil.Process(process.pid)
        self._base = 0
        self._prepared: set[Kind] = set()
        assert process.stderr is not None
        # Read to its end, which closes the pipe.
        self._stderr = asyncio.create_task(process.stderr.read())

    async def open(self, folder: "asyncio.Future[Path]") -> None:
        """Opens the tokenizer. Raises HelperLost, LoadFailed and what loading it raises."""
        try:
            async with asyncio.timeout(self._limits.start_s):
                _ = await self._while_starting(self.receive())
                path = await asyncio.shield(folder)
                self.send(Packet("open", {}, os.fsencode(path)))
                opened = await self._while_starting(self.receive())
        except EOFError as fault:
            code, ending = await self.process.wait(), await self._first_ending()
            if code < 0:
                raise HelperLost(ending) from fault
            raise LoadFailed(f"the tokenizer's process {ending}") from fault
        except TimeoutError as fault:
            why = f"did not start within {self._limits.start_s:g} s"
            raise LoadFailed(f"the tokenizer's process {why}") from fault
        self.longest_token = _accepted(opened).fields["longest_token"]
        self._base = self._resident()

    @property
    def has_ended(self) -> bool:
        assert self.process.stdout is not None
        return self.process.returncode is not None or self.process.stdout.at_eof()

    def send(self, packet: Packet) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(packet.pack())

    async def receive(self) -> Packet:
        """The next packet. Raises EOFError if the process has ended."""
        stdout = self.process.stdout
        assert stdout is not None
        text_bytes, data_bytes = HEAD.unpack(await stdout.readexactly(HEAD.size))
        kind, fields = json.loads(await stdout.readexactly(text_bytes))
        return Packet(kind, fields, await stdout.readexactly(data_bytes))

    async def ask(self, request: Packet, disconnected: asyncio.Event) -> Packet:
        """The answer. Raises what the helper refuses, InvalidRequest for a limit, and HelperLost.

        `disconnected` is set when no client waits for the answer any more.
        """
        preparation = _PREPARATIONS.get(request.kind)
        if preparation is not None and preparation not in self._prepared:
            # Its memory is limited here alone: libraries reserve more than they use.
            _ = await self._ask(Packet(preparation, {"memory_bytes": 0}), disconnected)
            self._prepared.add(preparation)
            self._base = self._resident()
        return await self._ask(request, disconnected)

    async def _ask(self, request: Packet, disconnected: asyncio.Event) -> Packet:
        limits = self._limits.for_kind(request.kind)
        cpu_s, memory_bytes = math.ceil(limits.cpu_s) + _BACKSTOP_S, limits.memory_bytes
        fields = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, **request.fields}
        self.send(request._replace(fields=fields))
        answer = asyncio.create_task(self.receive())
        try:
            refusal = await self._until_done(answer, disconnected, limits)
            if refusal is not None:
                raise refusal
            return _accepted(await answer)
        except EOFError as fault:
            raise await self._ending_fault() from fault
        finally:
            if not answer.done():
                _ = answer.cancel()
                await self.end()

    async def _until_done(
        self, answer: "asyncio.Task[Packet]", disconnected: asyncio.Event, limits: HelperLimits
    ) -> ExoNodeError | None:
        """Waits for the answer or the process's end; returns an error for an exceeded limit.

        Raises HelperLost for a process that hangs.
        """
        began, cpu_before = asyncio.get_running_loop().time(), self._cpu_s()
        budget = limits.cpu_s
        async for cpu_s, now in self._looks(answer, limits.idle_s):
            used = cpu_s - cpu_before
            if disconnected.is_set():
                budget = min(budget, used + limits.grace_s) if budget == limits.cpu_s else budget
            if used > budget or now - began > limits.wall_s:
                return InvalidRequest(
                    f"the model's chat template and tokenizer took more than {limits.cpu_s:g} s "
                    "for this prompt; shorten it, above all text without spaces, or correct the "
                    "template",
                    param=PROMPT,
                )
            if self._resident() > self._base + limits.memory_bytes:
                return over_memory()
        return None

    async def _while_starting(self, step: Awaitable[T]) -> T:
        """Waits for a step. Raises HelperLost if the process hangs meanwhile."""
        task = asyncio.ensure_future(step)
        try:
            async for _ in self._looks(task, self._limits.start_idle_s):
                pass
            return await task
        finally:
            _ = task.cancel()

    async def _looks(
        self, task: "asyncio.Future[T]", idle_s: float
    ) -> AsyncGenerator[tuple[float, float]]:
        """The process's CPU seconds and the time at each look, until the task is done.

        Raises HelperLost for a process that neither used CPU time for `idle_s` nor waits for a
        processor or a disk.
        """
        now, last_s, since, looks = asyncio.get_running_loop().time, -1.0, 0.0, 0
        while not (await asyncio.wait([task], timeout=self._limits.look_s))[0]:
            if (cpu_s := self._cpu_s()) != last_s:
                last_s, since, looks = cpu_s, now(), 0
            looks += 1
            if looks > _MIN_LOOKS and now() - since >= idle_s and not self._is_busy():
                raise HelperLost(f"did nothing for {idle_s:g} s")
            yield cpu_s, now()

    def _is_busy(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return self._usage.status() in _BUSY
        return True  # it has just ended

    def _cpu_s(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = self._usage.cpu_times()
            return times.user + times.system
        return 0.0

    def _resident(self) -> int:
        with contextlib.suppress(psutil.Error):
            return int(self._usage.memory_info().rss)
        return 0

    async def _ending_fault(self) -> Exception:
        code = await self.process.wait()
        ending = _ending(code)
        if -code not in _LIMIT_SIGNALS:
            return HelperLost(ending, crashed=code > 0 or -code in _CRASH_SIGNALS)
        return blamed_on_prompt(ending)

    async def _first_ending(self) -> str:
        """The exit status and stderr's last line, for a process that has received no prompt."""
        stderr = (await self._stderr).decode(errors="replace").strip()
        ending = _ending(await self.process.wait())
        return f"{ending}: {stderr.splitlines()[-1][:500]}" if stderr else ending

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        _ = await self.process.wait()
        _ = await asyncio.wait([self._stderr])


async def again_if_lost(attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of an attempt, or of a second one if its helper was lost. Raises HelperLost."""
    try:
        return await attempt()
    except HelperLost:
        return await attempt()


async def start_helper(folder: "asyncio.Future[Path]", limits: HelperLimits) -> HelperProcess:
    """A process that has opened the tokenizer in `folder`; a second one if the first hangs.

    Raises LoadFailed, and what loading the tokenizer raises.
    """
    try:
        return await again_if_lost(lambda: _start_once(folder, limits))
    except HelperLost as fault:
        raise LoadFailed(f"the tokenizer's process {fault.ending}, twice; try again") from fault


async def _start_once(folder: "asyncio.Future[Path]", limits: HelperLimits) -> HelperProcess:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "exo_node.shard.text.helper"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,  # until it has opened the tokenizer: from then on a crash may quote a prompt
        # The parent's modules may have come by PYTHONPATH, which a child does not see otherwise.
        env=_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))},
    )
    helper = HelperProcess(process, limits)
    try:
        await helper.open(folder)
    except BaseException:  # a cancelled load must not leave its process behind either
        await helper.end()
        raise
    return helper


def blamed_on_prompt(ending: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's tokenizer or chat template {ending} on this prompt; shorten it, or correct "
        "the template",
        param=PROMPT,
    )


def _ending(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"exited with status {code}"


def _accepted(answer: Packet) -> Packet:
    """The answer. Raises the helper's error if it is one."""
    if answer.kind == "fault":
        raise from_code(**answer.fields)
    return answer
