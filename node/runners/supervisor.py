"""The runners of this node, one for each stage that it holds."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...placement.cluster import layer_range
from ...placement.errors import InsufficientMemory
from ...proto import peer_pb2 as pb
from ...proto.fields import filled
from .runner_process import OnGpuFault, Progress, RunnerHost, RunnerProcess

log = logging.getLogger(__name__)

OnAnswer = Callable[[pb.StageSpec, pb.RunnerState], Awaitable[None]]


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
        promised = sum(promised_bytes(runner.spec) for runner in self._runners.values())
        unused, need = self._host.memory_bytes - promised, promised_bytes(spec)
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


def promised_bytes(spec: pb.StageSpec) -> int:
    """Bytes that its head counts for the stage."""
    stages = spec.plan.stages
    return stages[spec.stage].memory_bytes if spec.stage < len(stages) else 0


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
