"""Stages wherever they are: this node's own directly, others' through their nodes."""

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...placement.cluster import layer_range
from ...placement.errors import PeerLost, PeerRefused, RemovalRefused
from ...placement.ids import ModelId, NodeId, PlacementId
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.prefix_files import files_below
from ..cluster.cluster import Cluster
from ..links.measurements import Profiling
from ..machine.settings import Settings
from ..machine.tasks import unless
from ..machine.timing import Timing
from ..rpc.channels import Channels, checked
from ..rpc.control_client import ControlClient
from ..runners.runner_client import Endpoint, RunnerClient
from ..runners.supervisor import Supervisor
from ..store.fetching import ModelFetcher
from ..store.transfers import Progress as FilesProgress
from .stage_specs import on_this_machine
from .stages import Progress

log = logging.getLogger(__name__)

FREE_SHARE: Final = 10
"""The default bound is the free space, divided by this."""
MAX_DEFAULT_BYTES: Final = 20 * 10**9


def prefix_root(data_dir: Path) -> Path:
    """The folder of all prefixes of a node."""
    return data_dir / "prefixes"


def disk_bound(root: Path, gigabytes: float | None) -> int:
    """Bytes that all files below `root` may have. `gigabytes`: the setting."""
    if gigabytes is not None:
        return int(gigabytes * 10**9)
    own = sum(each.bytes for each in files_below(root))
    return min(MAX_DEFAULT_BYTES, (shutil.disk_usage(root.parent).free + own) // FREE_SHARE)


@dataclass(eq=False, repr=False)
class LocalStages:
    """Brings a stage's model here if it must, then starts a runner for its layers."""

    _settings: Settings
    _fetcher: ModelFetcher
    _profiling: Profiling
    _supervisor: Supervisor

    def __post_init__(self) -> None:
        self._loads: Counter[str] = Counter()

    async def load(self, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady:
        """Fetches the model and starts its runner. Raises what these do."""
        self._loads[spec.model] += 1
        try:
            return await self._load(spec, progress)
        finally:
            self._loads[spec.model] -= 1

    async def remove_files(self, model: ModelId, remove: Callable[[], None]) -> None:
        """Runs `remove`, which blocks, while no load gets the model's files; one waits for its end.

        Raises RemovalRefused while a load reads them.
        """
        if self._loads[model]:
            raise RemovalRefused(
                f"{model} is being loaded; wait for the load and unload it with `exo-node models "
                f"unload {model}`",
                param="model",
            )
        async with self._fetcher.lock(model):
            await asyncio.to_thread(remove)

    async def _load(self, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady:
        def moved(step: str, news: FilesProgress) -> None:
            step_progress = pb.LoadProgress(step=step, done=news.done_bytes, total=news.total_bytes)
            progress(step_progress)

        files = await self._fetcher.fetch(spec, moved)
        find = self._fetcher.drafter_folder
        own = await asyncio.to_thread(on_this_machine, spec, files.folder, self._settings, find)
        own.profile_folder = str(self._settings.data_dir / "profiles")
        prefixes = prefix_root(self._settings.data_dir)
        own.prefix_folder = str(prefixes)
        own.prefix_disk_bytes = disk_bound(prefixes, self._settings.prefix_disk_gb)
        size = sum(each.stat().st_size for each in Path(own.path).glob("*.safetensors"))
        layers = layer_range(own.first_layer, own.end_layer)
        log.info("loading %s of %s, of %.0f MB on disk", layers, own.model, size / 1e6)
        return await self._profiling.load(
            own, files.fingerprint, lambda: self._supervisor.load(own, progress)
        )

    def cpu_s_of(self, placement: PlacementId, stage: int) -> float | None:
        """See `Supervisor`."""
        return self._supervisor.cpu_s_of(placement, stage)

    async def unload(self, placement: PlacementId, stage: int, kill: bool) -> None:
        """Does nothing where there is no such runner."""
        await self._supervisor.unload(placement, stage, kill=kill)


PING_EXCHANGES = 10
"""Heartbeat exchanges that a ping waits for on a slow link. TCP sends lost data again after about
two round trips, then after twice and four times as long: two losses in a row fit, or three where
losses have lengthened the heartbeats as well."""


class ClusterStages(RunnerClient):
    """`stages.Stages` over the cluster; runners are dialled on the way that is quickest."""

    def __init__(
        self,
        local: LocalStages,
        cluster: Cluster,
        client: ControlClient,
        channels: Channels,
        profiling: Profiling,
        timing: Timing,
    ) -> None:
        super().__init__(channels, timing)
        self.local = local
        self._cluster = cluster
        self._client = client
        self._profiling = profiling
        self._ping_s, self._stall_s = timing.ping_s, timing.stall_s
        self._late_since: dict[tuple[NodeId, PlacementId, int], float] = {}
        """When the first of the pings began that a runner which computes has missed in a row."""
        self._self = cluster.self_id

    async def load(self, node: NodeId, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady:
        if node == self._self:
            return await self.local.load(spec, progress)
        self._cluster.note_loading(node, spec.placement, spec.stage)
        load = self._client.load(self._cluster.address(node), node, spec, progress)
        loading = self._profiling.record_refusal(spec, self._unless_gone(node, load))
        ready = checked(await loading, f"node {node}")
        return self.near(Endpoint(node, ready)).ready

    async def _unless_gone(self, node: NodeId, load: Awaitable[pb.LoadReady]) -> pb.LoadReady:
        """Awaits a load. Raises PeerLost once the node is lost: gRPC may learn that much later."""
        why = f"node {node} was lost while it loaded a stage"
        return await unless(self._cluster.until_gone(node), load, lambda: PeerLost(why))

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        if node == self._self:
            await self.local.unload(placement, stage, kill)
            return
        if not self._cluster.is_alive(node):
            raise PeerLost(f"node {node} does not answer")
        address = self._cluster.address(node)
        await self._client.unload(address, node, placement, stage, kill=kill)
        self._cluster.note_unloaded(node, placement, stage)

    async def connect(
        self, stage: Endpoint, following: Endpoint, placement: PlacementId, epoch: pb.Epoch
    ) -> None:
        near = self._profiling.quickest(stage.node, following)
        await super().connect(stage, near, placement, epoch)

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        """A runner that is late but computes answers with an empty state; one of another machine,
        which a broken link may keep from answering, for `stall_s` at most. Raises PeerLost, and at
        once where the cluster has lost the node."""
        ping = self._ping(stage, placement, number)
        if not self._cluster.knows(stage.node):
            return await ping
        why = f"node {stage.node}, which had stage {number}, was lost"
        return await unless(self._cluster.until_gone(stage.node), ping, lambda: PeerLost(why))

    async def _ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        way = self._cluster.exchange_s(stage.node)
        timeout = max(self._ping_s, PING_EXCHANGES * way)
        key = (stage.node, placement, number)
        before, began = self._cpu_s_of(*key), time.monotonic()
        try:
            state = await self.read_state(stage, placement, number, timeout)
        except PeerRefused:
            raise
        except PeerLost:
            after = self._cpu_s_of(*key)
            late_s = time.monotonic() - self._late_since.setdefault(key, began)
            is_cut = stage.node != self._self and late_s > self._stall_s
            if before is None or after is None or after <= before or is_cut:
                del self._late_since[key]
                raise
            return pb.RunnerState()
        _ = self._late_since.pop(key, None)
        state = checked(state, f"the runner on {stage.node}")
        if state.compute_ended:
            raise PeerLost(f"the compute thread of stage {number} on {stage.node} has ended")
        return state

    def _cpu_s_of(self, node: NodeId, placement: PlacementId, stage: int) -> float | None:
        """The CPU time of a runner, by its node, or None if it serves nothing there."""
        if node == self._self:
            return self.local.cpu_s_of(placement, stage)
        states = self._cluster.stages(node)
        own = (s.cpu_s for s in states if (s.placement, s.stage) == (placement, stage))
        return next(own, 0.0) or None

    def near(self, stage: Endpoint) -> Endpoint:
        """At the address that this node reaches it at quickest."""
        return self._profiling.quickest(self._self, stage)
