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
from .cluster.member import MemberFacts
from .cluster.node_exit import NodeExit
from .cluster.term_file import TermFile
from .join.duplicates import WatchedClient, uptime_ms
from .join.joining import Joining
from .join.operations import request_message
from .join.requests import PendingRequests
from .join.state import JoinState
from .local_node import LocalNode
from .rpc.channels import Channels


class PeerWiring:
    """The parts of a node that use other nodes. The caller that starts a part closes it."""

    def __init__(
        self,
        local: LocalNode,
        states: Callable[[], list[pb.StageState]],
        on_lost: Callable[[NodeId, str], None],
        desired: DesiredPlacements,
    ) -> None:
        """`states`: this node's stages. See `Cluster` for `on_lost` and `desired`.

        Raises InvalidSettings for a damaged term.
        """
        self._local = local
        self._requests = PendingRequests()
        keys, timing, cluster_state = local.keyring, local.timing, _cluster_state(local)
        self.channels = Channels(keys.credentials)
        self.ending = NodeExit()
        self.client = WatchedClient(
            self.channels, local.id, cluster_state.boot_id, self._facts, self.ending, timing
        )
        self.cluster = Cluster(
            lambda: MemberFacts(self._facts(), states()),
            self.client,
            cluster_state,
            on_lost,
            local.events,
            desired,
            local.loops,
        )
        state = JoinState(keys, local.about, self.cluster, self.ending, local.events, timing)
        self.joining = Joining(state, self.client, self._requests, local.loops)
        self.search = PeerSearch(local, self.cluster, self.joining)

    def answer_heartbeat(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        """Merges a peer's heartbeat and returns this node's. Raises if the sender may not join."""
        self.joining.check_heartbeat(beat)
        return self.cluster.answer(sender, beat)

    async def close(self) -> None:
        await self.joining.close()
        await self.client.close()
        await self.channels.close()

    def _facts(self) -> pb.NodeFacts:
        facts = self._local.facts()
        facts.uptime_ms = uptime_ms()
        facts.join_requests.extend(map(request_message, self._requests.pending()))
        return facts


def _cluster_state(local: LocalNode) -> ClusterState:
    """A node that cannot have peers leads at once."""
    settings, timing = local.settings, local.timing
    return ClusterState(
        local.id,
        boot_id=time.time_ns() // 1000,
        store=TermFile(settings.data_dir),
        now=time.monotonic(),
        timing=timing,
        wait_s=timing.heartbeat_s if settings.mdns or settings.peers else 0.0,
    )


class PeerSearch:
    """Sends members of the cluster to `Cluster`, and other nodes that are found to `Joining`."""

    def __init__(self, local: LocalNode, cluster: Cluster, joining: Joining) -> None:
        self._local = local
        self._cluster = cluster
        self._joining = joining
        self._discovery: Discovery | None = None

    def start(self, addresses: Iterable[str]) -> None:
        """Dials `addresses`; announces this node, which listens already, and looks for others."""
        for address in addresses:
            self._cluster.dial(address)
        local = self._local
        if local.settings.mdns:
            interfaces = None if local.settings.interface is None else [local.host]
            self._discovery = Discovery(
                self._announcement(), interfaces, self._dispatch, local.timing
            )
            self._discovery.start(local.loops)

    async def close(self) -> None:
        if self._discovery is not None:
            await self._discovery.close()

    def announce_again(self) -> None:
        """After this machine slept: its addresses may be others, and its sockets dead."""
        if self._discovery is not None:
            self._discovery.announce_again(self._announcement())

    async def reach(self) -> dict[str, Any]:
        """Whether this node and the others reach each other: the body of REACH_PATH."""
        members = self._cluster.reach()
        if (search := self._discovery) is None:
            return {"mdns": "off", "mdns_failure": None, "members": list(members.values())}
        answering = await search.answering(list(members))
        described = [member | {"mdns": node in answering} for node, member in members.items()]
        state = "works" if search.failure is None else "failed"
        return {"mdns": state, "mdns_failure": search.failure, "members": described}

    def _announcement(self) -> Announcement:
        return Announcement(
            self._local.id,
            self._local.keyring.fingerprint,
            self._local.version,
            self._local.host,
            self._local.grpc_port,
            self._joining.state.join_port,
        )

    def _dispatch(self, candidate: DiscoveredPeer) -> None:
        same_cluster = candidate.cluster == self._local.keyring.fingerprint
        if same_cluster and candidate.node != self._local.id:
            self._cluster.dial(candidate.address, candidate.node)
        else:
            self._joining.discover(candidate)
