"""What this node measures of itself and its links: kept, told in heartbeats, used for dialling."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...placement.cluster import OWN
from ...placement.errors import ExoNodeError, LoadFailed
from ...placement.ids import NodeId
from ...placement.split_refusal import SplitRefusal, refusal_in
from ...proto import peer_pb2 as pb
from ..cluster.member import MemberFacts
from ..machine.interfaces import source_address
from ..machine.tasks import Loops
from ..machine.timing import LinkTiming
from ..rpc.link_rpc import LinkClient
from ..runners.runner_client import Endpoint
from .layer_profiles import LayerProfiles
from .paths import LinkPath, fastest, nearest, ways
from .prober import LinkProber, Peer

log = logging.getLogger(__name__)

MAX_REFUSALS: Final = 64

_NOTHING: Final[Mapping[NodeId, Sequence[pb.LinkReport]]] = {}

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
        timing: LinkTiming,
    ) -> None:
        """`addresses`: where this node's control server and runners listen, the usual one first."""
        self._self = self_id
        self._addresses = list(addresses)
        self._profiles = profiles
        self._client = client
        self._refusals: dict[str, SplitRefusal] = {}
        self._products_refused = False
        self._members: Members = lambda: ()
        self._prober = LinkProber(
            self._peers, self._busy, client.measure, source_address, clock, timing
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, members: Members, loops: Loops) -> None:
        """`members`: the nodes that may take work, this one among them."""
        self._members = members
        self._tasks = [loops.keep(self._prober.run, "the measurement of links")]

    async def close(self) -> None:
        for task in self._tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def addresses(self) -> list[str]:
        return list(self._addresses)

    # ------------------------------------------------------------------------- told

    def tell(self, facts: pb.NodeFacts) -> pb.NodeFacts:
        """`facts` with what was measured here, for the heartbeat."""
        facts.profiles.extend(self._profiles.times())
        facts.addresses.extend(self._addresses)
        facts.links.extend(self._prober.reports())
        if self._products_refused and facts.float32_products == OWN:
            facts.float32_products = "a load found them wrong or slower here; see the log"
        refused = self._refusals.items()
        facts.split_refusals.extend(
            pb.SplitRefusal(model=m, reason=r.reason, borders=sorted(r.borders)) for m, r in refused
        )
        return facts

    def describe(
        self, fresh: Mapping[NodeId, Sequence[pb.LinkReport]] = _NOTHING
    ) -> dict[str, Any]:
        """The body of `GET /v1/cluster/profile`: nodes, and every measured way between two.

        `fresh` are reports that no heartbeat has brought yet.
        """
        facts = [_with_links(member, fresh.get(member.id)) for member in self._members()]
        known = ways(facts)
        return {
            "object": "cluster.profile",
            "nodes": [_node(each) for each in facts],
            "links": [_link(way, way == fastest(known, way.a, way.b)) for way in known],
        }

    async def measure_links(self) -> list[pb.LinkReport]:
        """This node's own links anew."""
        return await self._prober.measure_all()

    async def measure_cluster(self) -> dict[str, Any]:
        """Every node's links anew, one node after the other so that none disturbs another."""
        fresh: dict[NodeId, Sequence[pb.LinkReport]] = {}
        for member in self._members():
            if member.id == self._self:
                fresh[member.id] = await self.measure_links()
                continue
            address = f"{member.facts.host}:{member.facts.port}"
            try:
                fresh[member.id] = await self._client.measure_all(address, member.id)
            except ExoNodeError as fault:
                log.warning("%s could not measure its links: %s", member.facts.name, fault)
        return self.describe(fresh)

    # ------------------------------------------------------------------------- used

    async def load(self, spec: pb.StageSpec, checkpoint: str, load: Load) -> pb.LoadReady:
        """Runs `load` and keeps what it shows; `spec` is completed for this node before.

        `checkpoint` is the fingerprint of the files. Raises what `load` raises.
        """
        generator = spec.stage == 0
        spec.measure_layers = self._profiles.missing(checkpoint, spec.dtype, generator=generator)
        spec.listen.extend(self._addresses[1:])
        ready = await self.heeding(spec.model, load())
        if spec.dtype == "float32":
            self._products_refused = OWN not in ready.kernels
        if ready.HasField("layers"):
            await asyncio.to_thread(self._profiles.keep, checkpoint, ready.layers)
        return ready

    async def heeding(self, model: str, loading: Awaitable[pb.LoadReady]) -> pb.LoadReady:
        """Remembers a refusal to split the model, which a runner here or elsewhere gives."""
        try:
            return await loading
        except LoadFailed as fault:
            if refusal := refusal_in(fault.param, fault.message):
                self._refuse(model, refusal)
            raise

    def quickest(self, sender: NodeId, endpoint: Endpoint) -> Endpoint:
        """`endpoint` at the address that `sender` reaches its runner at quickest."""
        if sender == endpoint.node:
            return endpoint
        facts = [member.facts for member in self._members()]
        return replace(endpoint, ready=nearest(facts, sender, endpoint.node, endpoint.ready))

    # ----------------------------------------------------------------------- inside

    def _refuse(self, model: str, refusal: SplitRefusal) -> None:
        self._refusals[model] = refusal
        while len(self._refusals) > MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]

    def _peers(self) -> list[Peer]:
        """Of each pair of nodes the one with the lower id measures, both directions."""
        return [
            Peer(member.id, tuple(f"{host}:{member.facts.port}" for host in _hosts(member.facts)))
            for member in self._members()
            if member.id > self._self
        ]

    def _busy(self, peer: NodeId) -> bool:
        ends = (self._self, peer)
        states = [state for m in self._members() if m.id in ends for state in m.stages]
        return any(state.live_requests for state in states)


def build_profiling(
    self_id: NodeId,
    addresses: Sequence[str],
    folder: Path,
    device: str,
    mlx: str,
    client: LinkClient,
    clock: Callable[[], float],
    timing: LinkTiming,
) -> Profiling:
    """Reads the profiles that `folder` holds. `device` and `mlx` say what they must be of."""
    profiles = LayerProfiles(folder, device, mlx)
    return Profiling(self_id, addresses, profiles, client, clock, timing)


def _with_links(member: MemberFacts, fresh: Sequence[pb.LinkReport] | None) -> pb.NodeFacts:
    if fresh is None:
        return member.facts
    facts = pb.NodeFacts()
    facts.CopyFrom(member.facts)
    del facts.links[:]
    facts.links.extend(fresh)
    return facts


def _hosts(facts: pb.NodeFacts) -> Sequence[str]:
    return facts.addresses or [facts.host]


def _node(facts: pb.NodeFacts) -> dict[str, Any]:
    return {
        "id": facts.id,
        "name": facts.name,
        "chip": facts.chip,
        "backend": facts.backend,
        "memory_bytes": facts.memory_bytes,
        "memory_bandwidth": facts.memory_bandwidth,
        "addresses": list(facts.addresses),
        "layers": [
            {
                "model": times.model,
                "dtype": times.dtype,
                "decode_s": times.decode_s,
                "verify_s": times.verify_s,
                "verify_rows": times.verify_rows,
                "prefill_s": times.prefill_s,
                "prefill_rows": times.prefill_rows,
                "tail_s": times.tail_s or None,
            }
            for times in facts.profiles
        ],
        "split_refusals": {refusal.model: refusal.reason for refusal in facts.split_refusals},
    }


def _link(way: LinkPath, chosen: bool) -> dict[str, Any]:
    return {
        "nodes": [way.a, way.b],
        "addresses": [way.a_address, way.b_address],
        "round_trip_s": way.round_trip_s,
        "round_trip_min_s": way.round_trip_min_s,
        "bandwidth": way.bandwidth or None,
        "age_s": way.age_s,
        "chosen": chosen,
    }
