"""This node's measurements of itself and its links: stored, sent in heartbeats, used for calls."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from ...placement.errors import LoadFailed
from ...placement.gpu_faults import SHORTEST, ChunkLimit, GpuFault, shortened
from ...placement.ids import NodeId
from ...placement.kv_bits import FIELD as KV_BITS
from ...placement.kv_bits import refusal_in as kv_refusal_in
from ...placement.split_refusal import SplitRefusal, refusal_in
from ...proto import peer_pb2 as pb
from ..cluster.member import MemberFacts
from ..machine.interfaces import source_address
from ..machine.tasks import Loops, background, cancel
from ..machine.timing import Timing
from ..rpc.link_rpc import LinkClient
from ..runners.runner_client import Endpoint
from .layer_profiles import TIMES, LayerProfiles
from .paths import LinkPath, fastest, link_paths, nearest
from .prober import LinkProber

log = logging.getLogger(__name__)

MAX_REFUSALS: Final = 64
CHUNK: Final = "prefill_chunk"
"""The `param` of a refusal to load with more rows in a forward than a GPU fault has left."""
_NODE_FACTS: Final = ("id", "name", "chip", "backend", "memory_bytes", "memory_bandwidth")

Refusal = TypeVar("Refusal")

Members = Callable[[], Sequence[MemberFacts]]
Load = Callable[[], Awaitable[pb.LoadReady]]


class Profiling:
    """One node's profiles and links. All methods run on the node's event loop."""

    def __init__(
        self,
        self_id: NodeId,
        addresses: Sequence[str],
        profiles: LayerProfiles,
        client: LinkClient,
        clock: Callable[[], float],
        timing: Timing,
    ) -> None:
        """`addresses`: those of this node's control server and runners, the usual one first."""
        self._self = self_id
        self._addresses = list(addresses)
        self._profiles = profiles
        self._refusals: dict[str, SplitRefusal] = {}
        self._kv_refusals: dict[str, str] = {}
        self.gpu_faults = Counter[tuple[str, str]]()
        """The number of runners that GPU faults ended here, by model and fault."""
        self._members: Members = lambda: ()
        self._prober = LinkProber(
            self._peers, self._busy, client.measure, source_address, clock, timing
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, members: Members, loops: Loops) -> None:
        """`members` returns the nodes that may take work, this one among them."""
        self._members = members
        self._tasks = [loops.keep(self._prober.run, "the measurement of links")]

    async def close(self) -> None:
        await cancel(self._tasks)

    @property
    def addresses(self) -> list[str]:
        return list(self._addresses)

    @addresses.setter
    def addresses(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    def add_to(self, facts: pb.NodeFacts) -> pb.NodeFacts:
        """Adds this node's measurements to the facts of its heartbeat."""
        facts.profiles.extend(self._profiles.times())
        facts.addresses.extend(self._addresses)
        facts.links.extend(self._prober.reports())
        facts.split_refusals.extend(
            pb.SplitRefusal(model=model, reason=refusal.reason, borders=sorted(refusal.borders))
            for model, refusal in self._refusals.items()
        )
        facts.kv_refusals.extend(
            pb.KvRefusal(model=model, reason=reason) for model, reason in self._kv_refusals.items()
        )
        return facts

    def describe(self) -> dict[str, Any]:
        """The body of `GET /v1/cluster/profile`: nodes, and every measured path between two."""
        facts = [member.facts for member in self._members()]
        paths = link_paths(facts)
        return {
            "object": "cluster.profile",
            "nodes": [_node(each) for each in facts],
            "links": [_link(path, path == fastest(paths, path.a, path.b)) for path in paths],
        }

    def expect_other_links(self) -> None:
        """Every link is due: the measurements may be of another network."""
        self._prober.expect_others()

    async def load(self, spec: pb.StageSpec, checkpoint: str, load: Load) -> pb.LoadReady:
        """Completes `spec` for this node, runs `load`, and stores its measurements.

        `checkpoint` is the fingerprint of the files. Raises as `load`, and LoadFailed where the
        head does not know yet that a GPU fault has limited the chunk here.
        """
        limit = self._profiles.chunk_limit(spec.model)
        if limit is not None and spec.prefill_chunk > limit.rows:
            raise LoadFailed(f"{limit} rows; the model is placed again with that", param=CHUNK)
        is_short = self._profiles.is_short_of_memory(spec.model)
        spec.keeps_chunk = is_short or spec.prefill_chunk <= SHORTEST
        generator = spec.stage == 0
        spec.measure_layers = self._profiles.missing(checkpoint, spec.dtype, generator=generator)
        spec.listen.extend(self._addresses[1:])
        spec.checkpoint_sha256 = checkpoint
        ready = await self.record_refusal(spec, load())
        if ready.HasField("layers"):
            ready.layers.layer_bytes = spec.layer_bytes
            await asyncio.to_thread(self._profiles.store, checkpoint, ready.layers)
        return ready

    def limit_chunk(
        self, spec: pb.StageSpec, fault: GpuFault, *, is_measured: bool = False
    ) -> ChunkLimit | None:
        """Counts a GPU fault that ended a runner. Returns the limit that follows from it: none if
        it `is_measured`, since no prompt was involved."""
        self.gpu_faults[spec.model, fault] += 1
        if is_measured:
            return None
        is_short = self._profiles.is_short_of_memory(spec.model)
        limit = shortened(spec.prefill_chunk, fault, is_short=is_short)
        if limit is not None:
            save = self._profiles.limit_chunk(spec, limit)
            _ = background(asyncio.to_thread(save), "saving a chunk's limit")
        return limit

    async def correct(self, spec: pb.StageSpec, state: pb.RunnerState) -> None:
        """Corrects the times of a stage by what answers have just shown."""
        await asyncio.to_thread(self._profiles.correct, spec, state.step_s, state.mtp_speedup)

    async def record_refusal(
        self, spec: pb.StageSpec, loading: Awaitable[pb.LoadReady]
    ) -> pb.LoadReady:
        """Awaits a load, and records a runner's refusal to split the model or to quantise its
        caches. Raises as `loading`."""
        try:
            return await loading
        except LoadFailed as fault:
            if refusal := refusal_in(fault.param, fault.message):
                _add_bounded(self._refusals, spec.model, refusal)
            if fault.param == KV_BITS and spec.kv_bits:
                _add_bounded(self._kv_refusals, spec.model, kv_refusal_in(fault.message))
            raise

    def quickest(self, sender: NodeId, endpoint: Endpoint) -> Endpoint:
        """`endpoint` with the address at which `sender` reaches its runner quickest."""
        if sender == endpoint.node:
            return endpoint
        facts = [member.facts for member in self._members()]
        return replace(endpoint, ready=nearest(facts, sender, endpoint.node, endpoint.ready))

    def _peers(self) -> set[tuple[NodeId, str]]:
        """The members with larger ids: the smaller id of a pair measures both directions."""
        return {
            (member.id, f"{host}:{member.facts.port}")
            for member in self._members()
            if member.id > self._self
            for host in member.facts.addresses or [member.facts.host]
        }

    def _busy(self, peer: NodeId) -> bool:
        ends = (self._self, peer)
        states = [state for m in self._members() if m.id in ends for state in m.stages]
        return any(state.live_requests for state in states)


def _add_bounded(refusals: dict[str, Refusal], model: str, refusal: Refusal) -> None:
    refusals[model] = refusal
    while len(refusals) > MAX_REFUSALS:
        del refusals[next(iter(refusals))]


def _node(facts: pb.NodeFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in _NODE_FACTS} | {
        "addresses": list(facts.addresses),
        "layers": [
            {name: getattr(times, name) for name in ("model", "dtype", *TIMES)}
            | {"tail_s": times.tail_s or None}
            for times in facts.profiles
        ],
        "split_refusals": {refusal.model: refusal.reason for refusal in facts.split_refusals},
    }


def _link(path: LinkPath, is_chosen: bool) -> dict[str, Any]:
    return {
        "nodes": [path.a, path.b],
        "addresses": [path.a_address, path.b_address],
        "round_trip_s": path.round_trip_s,
        "round_trip_min_s": path.round_trip_min_s,
        "bandwidth": path.bandwidth or None,
        "age_s": path.age_s,
        "chosen": is_chosen,
    }
