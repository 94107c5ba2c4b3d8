"""Runner processes as supervised children, which never outlive the node."""

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
from ...placement.errors import InsufficientMemory, LoadFailed, from_code
from ...placement.gpu_faults import MEASUREMENT, GpuFault, gpu_fault
from ...proto import peer_pb2 as pb
from ...proto.fields import filled
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
OnAnswer = Callable[[pb.StageSpec, pb.RunnerState], Awaitable[None]]
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
                env=host.environment,
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


@dataclass(eq=False, repr=False)
class Supervisor:
    """The runners of this node, by placement and stage."""

    _host: RunnerHost
    _on_exit: Callable[[pb.StageSpec, str], None]
    """Called for a ready runner that ended by itself, with the reason."""
    _on_answer: OnAnswer | None = None
    """Called with the speeds that an answer has shown while no other runner worked."""
    _on_gpu_fault: OnGpuFault = lambda _spec, _fault, _measured: None
    """Called before a runner that one ended leaves `states`."""

    def __post_init__(self) -> None:
        self._runners: dict[tuple[str, int], RunnerProcess] = {}

    async def load(self, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady:
        """Starts a runner. Raises InsufficientMemory, and as `start`; leaves no process then."""
        key = (spec.placement, spec.stage)
        if key in self._runners:
            # Its head counts it as lost, as after a partition, and loads another one.
            log.info("stage %d of %s is loaded anew", spec.stage, spec.placement)
            await self.unload(*key, kill=True)
        self._require_room(spec)
        runner = self._runners[key] = RunnerProcess(
            spec, self._remove, self._answered, self._host.timing, self._on_gpu_fault
        )
        try:
            return await runner.start(self._host, progress)
        except BaseException:  # a cancelled load must not leave its child behind either
            if self._runners.get(key) is runner:
                del self._runners[key]
            await runner.stop()
            raise

    def _require_room(self, spec: pb.StageSpec) -> None:
        """Checks memory: two heads can overbook what one would not. Raises InsufficientMemory."""
        promised = sum(_promised(runner.spec) for runner in self._runners.values())
        unused, need = self._host.memory_bytes - promised, _promised(spec)
        if need and self._host.memory_bytes and need > unused:
            raise InsufficientMemory(
                f"{unused / 1e9:.2f} GB of this node are not promised to another stage, and "
                f"{layer_range(spec.first_layer, spec.end_layer)} of {spec.model} take "
                f"{need / 1e9:.2f} GB; unload a model, or start another node"
            )

    async def unload(self, placement: str, stage: int, *, kill: bool = False) -> None:
        """Stops the runner of a stage, if there is one."""
        if (runner := self._runners.pop((placement, stage), None)) is not None:
            await runner.stop(kill=kill)

    def cpu_s_of(self, placement: str, stage: int) -> float | None:
        """The CPU time that the runner of a stage has used, or None without a serving runner."""
        runner = self._runners.get((placement, stage))
        return None if runner is None else runner.serving_cpu_s

    async def close(self) -> None:
        runners, self._runners = list(self._runners.values()), {}
        _ = await asyncio.gather(*(runner.stop() for runner in runners))

    def states(self) -> list[pb.StageState]:
        """The states of all runners, for the heartbeat."""
        return [_placement_state(runner) for runner in self._runners.values()]

    def is_working(self, apart: RunnerProcess | None = None) -> bool:
        """Whether a runner loads or answers, leaving out `apart`."""
        others = (other for other in self._runners.values() if other is not apart)
        return any(other.status == "loading" or other.state.live_requests for other in others)

    async def _answered(self, runner: RunnerProcess, new: pb.RunnerState) -> None:
        if self._on_answer is not None and not self.is_working(apart=runner):
            await self._on_answer(runner.spec, new)

    def _remove(self, runner: RunnerProcess) -> None:
        key = (runner.spec.placement, runner.spec.stage)
        if self._runners.get(key) is runner:
            del self._runners[key]
            self._on_exit(runner.spec, runner.error)


def _promised(spec: pb.StageSpec) -> int:
    """Bytes that its head counts for the stage."""
    stages = spec.plan.stages
    return stages[spec.stage].memory_bytes if spec.stage < len(stages) else 0


def _size(folder: str) -> int:
    """The size of the weights, in bytes."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


async def _receive(reader: asyncio.StreamReader) -> pb.FromRunner | None:
    try:
        body = await reader.readexactly(body_bytes(await reader.readexactly(HEAD_BYTES)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pb.FromRunner.FromString(body)


_OF_THE_MACHINE = ("path", "listen", "profile_folder", "prefix_folder", "memory_limit_bytes")
"""Fields of a specification that the node filled in itself and that concern no other."""


def _placement_state(runner: RunnerProcess) -> pb.StageState:
    spec, state, ready = runner.spec, runner.state, runner.ready
    public = pb.StageSpec()
    public.CopyFrom(spec)
    for field in _OF_THE_MACHINE:
        public.ClearField(field)
    return filled(
        pb.StageState,
        state,
        spec=public,
        ready=ready,
        placement=spec.placement,
        model=spec.model,
        stage=spec.stage,
        first_layer=spec.first_layer,
        end_layer=spec.end_layer,
        epoch=state.epoch if state.HasField("epoch") else None,
        status=runner.status,
        weight_bytes=ready.weight_bytes if ready else 0,
        checkpoint_bytes_read=ready.checkpoint_bytes_read if ready else 0,
        pid=runner.pid,
        cpu_s=runner.serving_cpu_s or 0.0,
        error=runner.error,
    )
