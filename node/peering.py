"""A node among others: membership and joining, and the clients to other nodes and runners."""

import time
from collections.abc import Callable

from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .background import Loops
from .cluster import Cluster
from .control_client import Channels, RunnerClient
from .events import EventLog
from .held import Held
from .join_node import NodeJoining
from .local_node import LocalNode
from .peer_search import PeerSearch
from .settings import Settings
from .standing import Standing
from .term_file import TermFile
from .wishes import Wishes

HEAD_WAIT_S = 1.0
"""How long a node that may have peers looks for their head before it leads by itself."""


class Peering:
    """The parts of a node that know the others. Whoever starts one of them closes it."""

    def __init__(
        self,
        settings: Settings,
        local: LocalNode,
        states: Callable[[], list[pb.PlacementState]],
        on_lost: Callable[[NodeId, str], None],
        events: EventLog,
        wishes: Wishes,
        loops: Loops,
        held: Held,
    ) -> None:
        """See `Cluster` for `states`, `on_lost`, `wishes` and `held`.

        Raises InvalidSettings for a damaged term.
        """
        self._local = local
        keys = local.keyring
        standing = _standing(settings, local.id)
        self.channels = Channels(keys.credentials)
        self.joining = NodeJoining(
            keys.identity, keys.cluster, keys.folder, events, self._facts, open_name=settings.open
        )
        self.client = self.joining.client(self.channels, standing.life)
        self.runners = RunnerClient(self.channels)
        self.cluster = Cluster(
            self._facts,
            states,
            self.client,
            standing,
            on_lost,
            keys.fingerprint,
            events,
            wishes,
            loops,
            held,
        )
        self.search = PeerSearch(settings, local, self.cluster, self.joining, loops)

    def _facts(self) -> pb.NodeFacts:
        return self.joining.tell(self._local.facts())


def _standing(settings: Settings, node: NodeId) -> Standing:
    """A node that cannot have peers leads at once."""
    may_have_peers = settings.mdns or bool(settings.peers)
    return Standing(
        node,
        life=time.time_ns() // 1000,
        store=TermFile(settings.data_dir),
        now=time.monotonic(),
        wait_s=HEAD_WAIT_S if may_have_peers else 0.0,
    )
