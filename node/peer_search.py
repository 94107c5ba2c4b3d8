"""Where a node finds others: at the addresses that a person named, and by mDNS."""

from collections.abc import Iterable

from .background import Loops
from .cluster import Cluster
from .discovery import Announcement, Candidate, Discovery
from .joining import Joining
from .local_node import LocalNode
from .settings import Settings


class PeerSearch:
    """Leads members of the cluster to `Cluster`, and whoever else is found to `Joining`."""

    def __init__(
        self,
        settings: Settings,
        local: LocalNode,
        cluster: Cluster,
        joining: Joining,
        loops: Loops,
    ) -> None:
        self._settings = settings
        self._local = local
        self._cluster = cluster
        self._joining = joining
        self._loops = loops
        self._discovery: Discovery | None = None

    def start(self, addresses: Iterable[str]) -> None:
        """Dials `addresses`; announces this node, which listens already, and looks for others."""
        for address in addresses:
            self._cluster.dial(address)
        if self._settings.mdns:
            interfaces = None if self._settings.interface is None else [self._local.host]
            self._discovery = Discovery(self._announcement(), interfaces, self._found)
            self._discovery.start(self._loops)

    async def close(self) -> None:
        if self._discovery is not None:
            await self._discovery.close()

    def _announcement(self) -> Announcement:
        return Announcement(
            self._local.id,
            self._local.keyring.fingerprint,
            self._local.version,
            self._local.host,
            self._local.grpc_port,
            self._joining.state.join_port,
        )

    def _found(self, candidate: Candidate) -> None:
        same_cluster = candidate.cluster == self._local.keyring.fingerprint
        if same_cluster and candidate.node != self._local.id:
            self._cluster.dial(candidate.address, candidate.node)
        else:
            self._joining.found(candidate)
