"""Joining put together: the join port, both sides of it, and the watch for company."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from ...placement.errors import DuplicateIdentity, PeerLost
from ...proto import peer_pb2 as pb
from ..cluster.discovery import DiscoveredPeer
from ..machine.tasks import Loops
from ..trust.certificates import join_credentials
from .approver import Approver
from .asker import Asker
from .duplicates import WatchedClient
from .port import JoinPort
from .rekey import Rekeying
from .requests import PendingRequests
from .state import JoinState
from .wire import Refusal, ask_for_hint, join_address, split, tls_contexts

log = logging.getLogger(__name__)


class Joining:
    """One node's joining: `listen`, then `begin`, at the end `close`."""

    def __init__(
        self,
        state: JoinState,
        client: WatchedClient,
        desk: PendingRequests,
        loops: Loops,
    ) -> None:
        self.state = state
        server, tls = tls_contexts(join_credentials(state.identity), state.folder.data_dir)
        self.rekeying = Rekeying(self.state, tls)
        self.asker = Asker(self.state, tls, loops)
        self.approver = Approver(self.state, self.asker, self.rekeying, client, desk)
        self.desk = desk
        self.client = client
        self._port = JoinPort(server, self.approver.attend, self._complain, loops, state.timing)
        self._loops = loops
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, hosts: Sequence[str], grpc_port: int) -> int:
        """The join port: the one after the node-to-node port, a free one where that is taken."""
        wanted = grpc_port + 1 if 0 < grpc_port < 65535 else 0
        self.state.join_port = self._port.start(hosts, wanted)
        return self.state.join_port

    def begin(self, peers: Sequence[str]) -> None:
        """Answers, and looks what is behind `peers`, the control ports that a person named."""
        self._port.begin()
        self._tasks = [
            self._loops.keep(partial(self._look_at, peer), f"the look at {peer}") for peer in peers
        ]
        self._tasks.append(self._loops.keep(self._watch, "the watch for company"))
        if self.state.open_name is not None:
            log.warning(
                "OPEN: whoever starts a node with the same --open on this network is let into this "
                "cluster without approval, sees prompts and answers and can use this machine"
            )

    async def close(self) -> None:
        for task in self._tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.asker.close()
        await self._port.close()

    def found(self, candidate: DiscoveredPeer) -> None:
        """A node of another cluster, or another process with this node's id."""
        if candidate.node == self.state.node and candidate.cluster == self.state.fingerprint:
            self.client.meet(candidate.address)
        elif candidate.join_address is not None:
            self.asker.see(candidate.join_address)

    def heard(self, beat: pb.Heartbeat) -> None:
        """A heartbeat of an authenticated sender. Raises DuplicateIdentity and PeerLost."""
        try:
            self.client.check(beat)
        except DuplicateIdentity as fault:
            where = f"{beat.sender.host}:{beat.sender.port}"
            self.state.refused(where, Refusal("duplicate", fault.message))
            raise

    async def _watch(self) -> None:
        """Somebody else is in the cluster: it is established from then on."""
        while True:
            await asyncio.sleep(self.state.timing.watch_s)
            if self.state.founded and not self.state.fresh:
                self.approver.settle()

    async def _look_at(self, peer: str) -> None:
        """A control port that a person named: of another cluster, it tells its join port."""
        host, _ = split(peer)
        while True:
            try:
                hint = await ask_for_hint(peer, self.state.timing)
            except PeerLost:
                hint = None
            if hint is not None and hint.cluster != self.state.fingerprint:
                self.asker.see(join_address(host, hint.join_port))
            await asyncio.sleep(self.state.timing.look_at_peer_s)

    def _complain(self, who: str, why: str) -> None:
        self.state.refused(who, Refusal("malformed", why))
