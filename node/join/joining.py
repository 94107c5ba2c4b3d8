"""The parts of joining: the join port, both sides of it, the watch for other members, and the text
on the terminal."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

from ...placement.errors import DuplicateIdentity, PeerLost
from ...proto import peer_pb2 as pb
from ..cluster.discovery import DiscoveredPeer
from ..machine.log import show, terminal
from ..machine.own_command import own_command
from ..machine.tasks import Loops, cancel
from ..trust.certificates import join_credentials
from .approver import Approver
from .asker import Asker
from .duplicates import WatchedClient
from .handshake import PeerIdentity, spaced
from .port import JoinPort
from .requests import PendingRequests
from .state import JoinState
from .wire import Refusal, ask_for_hint, join_address, split, tls_contexts

_NAMED = 6
"""Nodes that the block names."""


def notice(
    own: PeerIdentity, hosts: Sequence[PeerIdentity], guests: Sequence[PeerIdentity], code: str
) -> str:
    """The block of a node that asks the clusters of `hosts` and lets `guests` in.

    `code`: the digits that it shows. Empty where it neither asks nor is asked.
    """
    parties = {each.node: each for each in (*hosts, *guests) if each.node != own.node}
    counts = Counter([own.name, *(each.name for each in parties.values())])

    def named(each: PeerIdentity) -> str:
        return each.name if counts[each.name] == 1 else f"{each.name} ({each.node[:8]})"

    others = [*map(named, parties.values())]
    if not others:
        return ""
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    lines = [f"Other nodes here: {', '.join(others[:_NAMED])}{more}."]
    if hosts:
        # With its id: an impostor of its name may ask beside it, which only the others see.
        who = f"{own.name}, {own.node[:8]}"
        lines += [f"To let this one ({who}) in, run there:  exo-node approve {spaced(code)}"]
    if guests:
        lines += [f"To let one of them in here:  {own_command()} approve DIGITS NAME"]
        lines += ["  with the digits that it shows itself"]
    return "\n".join(lines)


class JoinNotice:
    """Decides when the block is printed: once it stood for two looks, and not twice."""

    def __init__(self) -> None:
        self._last = ""
        self._printed = ""

    def due(self, block: str) -> str:
        """The text to print after a look at `block`; empty for none."""
        is_stable, self._last = block == self._last, block
        if not is_stable or block == self._printed:
            return ""
        self._printed = block
        return block


log = logging.getLogger(__name__)


class Joining:
    """One node's joining: `listen`, then `begin`, finally `close`."""

    def __init__(
        self, state: JoinState, client: WatchedClient, requests: PendingRequests, loops: Loops
    ) -> None:
        self.state = state
        credentials = join_credentials(state.keys.identity)
        server, tls = tls_contexts(credentials, state.keys.folder.data_dir)
        self.asker = Asker(self.state, tls, loops)
        self.approver = Approver(self.state, self.asker, client, requests)
        self.requests = requests
        self.client = client
        self._port = JoinPort(server, self.approver.attend, state, loops)
        self._loops = loops
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, hosts: Sequence[str], grpc_port: int) -> int:
        """The join port: the one after the node-to-node port, a free one where that is taken."""
        preferred_port = grpc_port + 1 if 0 < grpc_port < 65535 else 0
        self.state.join_port = self._port.start(hosts, preferred_port)
        return self.state.join_port

    def begin(self, peers: Sequence[str]) -> None:
        """Answers connections, and calls the control ports `peers` that a person named."""
        self._port.begin()
        self._tasks = [
            self._loops.keep(partial(self._call_peer, peer), f"the look at {peer}")
            for peer in peers
        ]
        self._tasks.append(self._loops.keep(self._watch, "the watch for company"))
        if terminal() is not None:
            self._tasks.append(self._loops.keep(self._show, "the notice of joining"))

    async def close(self) -> None:
        await cancel(self._tasks)
        await self._port.close()  # first: a join that it cuts off lets the asker call again
        await self.asker.close()

    def discover(self, candidate: DiscoveredPeer) -> None:
        """Calls a node of another cluster, or another process with this node's id."""
        if candidate.node == self.state.node and candidate.cluster == self.state.keys.fingerprint:
            self.client.challenge(candidate.address)
        elif candidate.join_address is not None:
            self.asker.discover(candidate.join_address)

    def check_heartbeat(self, beat: pb.Heartbeat) -> None:
        """Checks that the authenticated sender is no copy. Raises DuplicateIdentity, PeerLost."""
        try:
            self.client.check(beat)
        except DuplicateIdentity as fault:
            where = f"{beat.sender.host}:{beat.sender.port}"
            self.state.report_refusal(where, Refusal("duplicate", fault.message))
            raise

    async def _watch(self) -> None:
        """Settles this node once another one is in its cluster."""
        while True:
            await asyncio.sleep(self.state.timing.retry_s)
            if not self.state.is_settled and not self.state.fresh:
                self.approver.settle()

    async def _show(self) -> None:
        """Shows a person at the terminal whom to let in, and by what."""
        notices = JoinNotice()
        while True:
            await asyncio.sleep(self.state.timing.retry_s)
            hosts = [each.approver for each in self.asker.calls.applications()]
            guests = [each.party for each in self.requests.pending()]
            block = notice(self.state.describe_self(), hosts, guests, self.asker.code or "")
            show(notices.due(block))

    async def _call_peer(self, peer: str) -> None:
        """Discovers the join port beside a control port that is another cluster's."""
        host, _ = split(peer)
        while True:
            try:
                hint = await ask_for_hint(peer, self.state.timing)
            except PeerLost:
                hint = None
            if hint is not None and hint.cluster != self.state.keys.fingerprint:
                self.asker.discover(join_address(host, hint.join_port))
            await asyncio.sleep(self.state.timing.look_again_s)
