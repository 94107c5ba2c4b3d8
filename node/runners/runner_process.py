"""A runner: a supervised child process, which never outlives the node."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...placement.cluster import layer_range
from ...placement.errors import LoadFailed, from_code
from ...placement.gpu_faults import MEASUREMENT, GpuFault, gpu_fault
from ...proto import peer_pb2 as pb
from ...proto.framing import HEAD_BYTES, body_bytes, framed
from ..machine.log import apart
from ..machine.settings import LOAD_TIMEOUT_S
from ..machine.tasks import cancel
from ..machine.timing import Timing
from ..trust.certificates import Credentials
from .load_watch import LoadWatch, cpu_seconds, idle_s, is_stopped
from .runner_log import LAST_WORDS_S, relay

log = logging.getLogger(__name__)

Status = Literal["loading", "ready", "failed"]
Progress = Callable[[pb.LoadProgress], None]
OnGpuFault = Callable[[pb.StageSpec, GpuFault, bool], None]
"""Its last argument: whether a measurement between answers had the fault."""


@dataclass(frozen=True, slots=True)
class RunnerHost:
    """The settings that all runners of this node share."""

    node: str
    host: str  # to listen on, where other nodes' runners reach it
    credentials: Callable[[], Credentials]  # a leaf of its own for each runner
    environment: Mapping[str, str]
    timing: Timing
    load_timeout_s: float = LOAD_TIMEOUT_S
    memory_bytes: int = 0
    """The most that all stages together may be promised, or 0 for no limit."""

    def environment_of(self, spec: pb.StageSpec) -> Mapping[str, str]:
        """An embedder's products in float32 are whole: rounded to TF32 as CUDA's are, they move an
        embedding by 1e-4, otherwise beside other inputs than alone."""
        return {**self.environment, "MLX_ENABLE_TF32": "0"} if spec.pooling else self.environment


class RunnerProcess:
    """One child and its last state. `on_exit` is called once, when a ready runner ends."""

    def __init__(
        self,
        spec: pb.StageSpec,
        on_exit: Callable[["RunnerProcess"], None],
        on_answer: Callable[["RunnerProcess", pb.RunnerState], Awaitable[None]],
        timing: Timing,
        on_gpu_fault: OnGpuFault = lambda _spec, _fault, _measured: None,
    ) -> None:
        self.spec = spec
        self.status: Status = "loading"
        self.state = pb.RunnerState()
        self.ready: pb.LoadReady | None = None
        self.error = ""
        self._on_exit = on_exit
        self._on_answer = on_answer
        self._on_gpu_fault: OnGpuFault | None = on_gpu_fault
        self._timing = timing
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_lines: deque[str] = deque(maxlen=20)
        self._stopping = False
        self._silent_s = 0.0
        self._cpu_s = 0.0
        self._verdict = ""
        """The reason why this process ended it, or the child's own last failure."""
        self._is_measured = False
        """Whether that failure was a measurement's."""

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self, host: RunnerHost, progress: Progress) -> pb.LoadReady:
        """Starts the child and waits until its stage is loaded.

        Raises LoadFailed, InvalidCheckpoint and any other error that the child reports.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "exo_node.shard.runner.main", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=host.environment_of(self.spec),
                start_new_session=True,  # Ctrl-C reaches the node alone, which stops its runners
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        watch = LoadWatch(host.load_timeout_s, _size(self.spec.path))
        self._tasks = [
            self._apart(relay(self._process, self._last_lines)),
            self._apart(self._end_if_stuck(watch, progress)),
        ]
        with contextlib.suppress(ConnectionError):  # it has ended: `_await_ready` says why
            await self._send(pb.ToRunner(start=self._start_message(host)))
        self.ready = await self._await_ready(reader, progress, watch)
        self.status = "ready"
        self._tasks += [self._apart(self._watch(reader)), self._apart(self._end_if_silent())]
        return self.ready

    def _apart(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Starts a task outside the context of the request that needs this runner first."""
        return asyncio.create_task(work, context=apart())

    async def stop(self, *, kill: bool = False) -> None:
        """Stops the process, and kills it after `reply_s` (`kill`: at once); returns at its end."""
        self._stopping = True
        if self._process is None:
            return
        if kill and self._process.returncode is None:
            self._process.kill()
        try:
            await self._send(pb.ToRunner(stop=pb.RunnerStop()))
            async with asyncio.timeout(self._timing.reply_s):
                _ = await self._process.wait()
        except (TimeoutError, ConnectionError):
            if self._process.returncode is None:
                self._process.kill()
            _ = await self._process.wait()
        _ = await self._ending()  # what ended it may not have been noticed yet
        if self._writer is not None:
            self._writer.close()
        await cancel(self._tasks)

    def _start_message(self, host: RunnerHost) -> pb.RunnerStart:
        credentials = host.credentials()
        return pb.RunnerStart(
            stage=self.spec,
            node=host.node,
            host=host.host,
            certificate=credentials.certificate_pem,
            private_key=credentials.key_pem,
            authority=credentials.authority_pem,
        )

    async def _send(self, message: pb.ToRunner) -> None:
        assert self._writer is not None
        self._writer.write(framed(message.SerializeToString()))
        await self._writer.drain()

    async def _await_ready(
        self, reader: asyncio.StreamReader, progress: Progress, watch: LoadWatch
    ) -> pb.LoadReady:
        while (message := await _receive(reader)) is not None:
            match message.WhichOneof("message"):
                case "ready":
                    return message.ready
                case "failure":
                    f = message.failure
                    self._fail(f.message)
                    raise from_code(f.code, f.message, f.param or None)
                case "state":
                    watch.report_progress(message.state.progress)
                    self._end_if_numb(message.state)
                case _:
                    watch.report_step()
                    progress(message.progress)
        self._fail(await self._ending())
        raise LoadFailed(self.error)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        while (message := await _receive(reader)) is not None:
            match message.WhichOneof("message"):
                case "state":
                    before, self.state = self.state, message.state
                    self._silent_s = 0.0
                    self._end_if_numb(message.state)
                    await self._on_state(before)
                case "failure":
                    self._verdict = message.failure.message
                    self._is_measured = message.failure.param == MEASUREMENT
                case _:
                    pass
        self._fail(await self._ending())
        if not self._stopping:
            if self._writer is not None:
                self._writer.close()
            log.warning("%s", self.error)
            self._on_exit(self)

    async def _on_state(self, before: pb.RunnerState) -> None:
        """Reports what answers have shown since `before`."""
        new = pb.RunnerState(mtp_speedup=self.state.mtp_speedup)
        if self.state.timed_answers != before.timed_answers:
            new.step_s = self.state.step_s
        if new.step_s or new.mtp_speedup != before.mtp_speedup:
            await self._on_answer(self, new)

    async def _end_if_silent(self) -> None:
        """Ends a runner whose event loop is silent: it hangs, and holds its memory.

        Counts turns of this loop, so that a pause of this process does not count as the child's.
        """
        assert self._process is not None
        tick_s = self._timing.watch_s
        while self._silent_s < self._timing.silent_ticks * tick_s:
            await asyncio.sleep(tick_s)
            self._silent_s += idle_s(tick_s, self._used_cpu_s())
            if self._process.returncode is not None:
                return
        self._end(f"it said nothing for {self._timing.silence_s:.0f} s")

    async def _end_if_stuck(self, watch: LoadWatch, progress: Progress) -> None:
        assert self._process is not None
        tick_s, stopped_s = self._timing.watch_s, 0.0
        while self.status == "loading" and self._process.returncode is None:
            await asyncio.sleep(tick_s)
            why = watch.tick(tick_s, self._used_cpu_s())
            stopped_s = stopped_s + tick_s if is_stopped(self.pid) else 0.0
            if stopped_s >= self._timing.silence_s:
                why = f"a signal stopped it for {stopped_s:.0f} s while it loaded"
            if self.status == "loading" and why:
                return self._end(why)
            if self.status == "loading" and (notice := watch.notice()):
                progress(pb.LoadProgress(step=notice))

    def _used_cpu_s(self) -> float:
        """The CPU time of the child since the last call."""
        before, self._cpu_s = self._cpu_s, cpu_seconds(self.pid)
        return self._cpu_s - before

    @property
    def serving_cpu_s(self) -> float | None:
        """The CPU time that it has used; None unless it has been loaded and has not ended."""
        ended = self._process is None or self._process.returncode is not None
        serves = self.status == "ready" and not ended and not self._verdict
        return cpu_seconds(self.pid) if serves else None

    def _end_if_numb(self, state: pb.RunnerState) -> None:
        if state.compute_ended and not self._verdict:
            self._end("its compute thread ended by an error")

    def _end(self, why: str) -> None:
        assert self._process is not None
        self._verdict = why
        log.warning("runner %d is ended: %s", self.pid, why)
        if self._process.returncode is None:
            self._process.kill()

    def _fail(self, error: str) -> None:
        self.status, self.error = "failed", error

    async def _ending(self) -> str:
        """Why the child ended, with its last lines; reports a GPU fault, once, of a loaded one.

        Earlier lines of one that was stopped or killed may name a fault that it survived.
        """
        assert self._process is not None
        code = await self._process.wait()
        if self._tasks and code != -signal.SIGKILL:
            _ = await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_S)
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        how += f" ({self._verdict})" if self._verdict else ""
        s, lines = self.spec, " | ".join(self._last_lines)
        last = f"; it last wrote: {lines}" if lines and not self._verdict else ""
        words = self._verdict or ("" if code in (0, -signal.SIGKILL) else lines)
        if self._on_gpu_fault and self.ready and (fault := gpu_fault(words)):
            self._on_gpu_fault(s, fault, self._is_measured)
            self._on_gpu_fault = None
        return f"the runner of {s.model}, {layer_range(s.first_layer, s.end_layer)}, {how}{last}"


def _size(folder: str) -> int:
    """The size of the weights, in bytes."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


async def _receive(reader: asyncio.StreamReader) -> pb.FromRunner | None:
    try:
        body = await reader.readexactly(body_bytes(await reader.readexactly(HEAD_BYTES)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pb.FromRunner.FromString(body)
