"""A node among others: membership and joining, and the clients to other nodes and runners."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .cluster.cluster import Cluster
from .cluster.cluster_state import ClusterState
from .cluster.desired import DesiredPlacements
from .cluster.discovery import Announcement, DiscoveredPeer, Discovery
from .cluster.node_exit import NodeExit
from .cluster.term_file import TermFile
from .join.duplicates import WatchedClient, uptime_ms
from .join.joining import Joining
from .join.operations import request_message
from .join.requests import PendingRequests
from .join.state import JoinState
from .local_node import LocalNode
from .machine.settings import Settings
from .machine.tasks import Loops
from .machine.timing import Timing
from .rpc.channels import Channels
from .runners.runner_client import RunnerClient


class PeerWiring:
    """The parts of a node that know the others. Whoever starts one of them closes it."""

    def __init__(
        self,
        local: LocalNode,
        states: Callable[[], list[pb.StageState]],
        on_lost: Callable[[NodeId, str], None],
        desired: DesiredPlacements,
    ) -> None:
        """See `Cluster` for `states`, `on_lost` and `desired`.

        Raises InvalidSettings for a damaged term.
        """
        self._local = local
        settings, timing, events, loops = local.settings, local.timing, local.events, local.loops
        self._requests = PendingRequests()
        keys, cluster_state = local.keyring, _cluster_state(settings, local.id, timing)
        self.channels = Channels(keys.credentials)
        self.ending = NodeExit()
        self.client = WatchedClient(
            self.channels, local.id, cluster_state.boot_id, self._facts, self.ending, timing
        )
        self.runners = RunnerClient(self.channels, timing)
        self.cluster = Cluster(
            self._facts,
            states,
            self.client,
            cluster_state,
            on_lost,
            keys.fingerprint,
            events,
            desired,
            loops,
            timing,
        )
        state = JoinState(
            keys.identity,
            keys.cluster,
            keys.folder,
            local.about,
            self.cluster,
            self.ending,
            events,
            timing,
            open_name=settings.open,
        )
        self.joining = Joining(state, self.client, self._requests, loops)
        self.search = PeerSearch(settings, local, self.cluster, self.joining, loops, timing)

    async def close(self) -> None:
        await self.joining.close()
        await self.client.close()
        await self.channels.close()

    def _facts(self) -> pb.NodeFacts:
        facts = self._local.facts()
        facts.uptime_ms = uptime_ms()
        facts.join_requests.extend(map(request_message, self._requests.pending()))
        return facts


def _cluster_state(settings: Settings, node: NodeId, timing: Timing) -> ClusterState:
    """A node that cannot have peers leads at once."""
    may_have_peers = settings.mdns or bool(settings.peers)
    return ClusterState(
        node,
        boot_id=time.time_ns() // 1000,
        store=TermFile(settings.data_dir),
        now=time.monotonic(),
        timing=timing,
        wait_s=timing.heartbeat_s if may_have_peers else 0.0,
    )


class PeerSearch:
    """Leads members of the cluster to `Cluster`, and whoever else is found to `Joining`."""

    def __init__(
        self,
        settings: Settings,
        local: LocalNode,
        cluster: Cluster,
        joining: Joining,
        loops: Loops,
        timing: Timing,
    ) -> None:
        self._settings = settings
        self._local = local
        self._cluster = cluster
        self._joining = joining
        self._loops = loops
        self._timing = timing
        self._discovery: Discovery | None = None

    def start(self, addresses: Iterable[str]) -> None:
        """Dials `addresses`; announces this node, which listens already, and looks for others."""
        for address in addresses:
            self._cluster.dial(address)
        if self._settings.mdns:
            interfaces = None if self._settings.interface is None else [self._local.host]
            self._discovery = Discovery(self._announcement(), interfaces, self._found, self._timing)
            self._discovery.start(self._loops)

    async def close(self) -> None:
        if self._discovery is not None:
            await self._discovery.close()

    async def reach(self) -> dict[str, Any]:
        """Whether this node and the others reach each other: the body of REACH_PATH."""
        members = self._cluster.reach()
        if (search := self._discovery) is None:
            return {"mdns": "off", "mdns_failure": None, "members": list(members.values())}
        heard = await search.answering(list(members))
        told = [member | {"mdns": node in heard} for node, member in members.items()]
        state = "works" if search.failure is None else "failed"
        return {"mdns": state, "mdns_failure": search.failure, "members": told}

    def _announcement(self) -> Announcement:
        return Announcement(
            self._local.id,
            self._local.keyring.fingerprint,
            self._local.version,
            self._local.host,
            self._local.grpc_port,
            self._joining.state.join_port,
        )

    def _found(self, candidate: DiscoveredPeer) -> None:
        same_cluster = candidate.cluster == self._local.keyring.fingerprint
        if same_cluster and candidate.node != self._local.id:
            self._cluster.dial(candidate.address, candidate.node)
        else:
            self._joining.discover(candidate)
