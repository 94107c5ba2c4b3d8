"""Nodes that only join, over real sockets, and an impostor that attacks them."""

import asyncio
import hashlib
import secrets
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from exo_node.node.cluster.cluster import Cluster
from exo_node.node.cluster.member import MemberFacts
from exo_node.node.cluster.node_exit import NodeExit, RestartWithKey
from exo_node.node.join.duplicates import WatchedClient
from exo_node.node.join.handshake import PeerIdentity
from exo_node.node.join.joining import Joining
from exo_node.node.join.requests import PendingRequest, PendingRequests
from exo_node.node.join.state import JoinState
from exo_node.node.join.wire import JoinConnection, connect, hello, party_of, tls_contexts
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL
from exo_node.node.rpc.control_server import PROTOCOL
from exo_node.node.trust.certificates import (
    cluster_fingerprint,
    join_credentials,
    node_credentials,
    proven_public_key,
)
from exo_node.node.trust.cluster_key import KeyFolder, Keyring
from exo_node.node.trust.keys import ClusterKey, Identity, load_or_create_identity
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

LOOPBACK = "127.0.0.1"
WITHIN_S = 60.0


def party(letter: str, **changed: Any) -> PeerIdentity:
    """The identity of a fresh node in a cluster of its own."""
    plain = PeerIdentity(
        node=NodeId(letter * 20),
        public_key=f"key of {letter}".encode(),
        cluster=hashlib.sha256(letter.encode()).hexdigest()[:16],
        name=letter,
        chip="chip",
        version="0.1.0",
        protocol=PROTOCOL,
        address="10.0.0.1:52416",
        fresh=True,
        nonce=letter.encode() * 32,
    )
    return replace(plain, **changed)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


@dataclass
class Company:
    """The part of `Cluster` that joining uses: the other members."""

    live: list[MemberFacts] = field(default_factory=list[MemberFacts])
    dialled: list[str] = field(default_factory=list[str])
    addresses: dict[str, str] = field(default_factory=dict[str, str])

    def others(self) -> list[MemberFacts]:
        return self.live

    def address(self, node: NodeId) -> str:
        return self.addresses[node]

    def dial(self, address: str, node: NodeId | None = None) -> None:
        self.dialled.append(address)


class NoHeartbeats:
    """The `WatchedClient` of a test, which has the boot ids that the test sets."""

    def __init__(self) -> None:
        self.boot_ids: dict[str, int] = {}

    async def boot_id_at(self, address: str, node: NodeId) -> int | None:
        return self.boot_ids.get(node)


@dataclass
class Joiner:
    """A node with its joining alone."""

    joining: Joining
    identity: Identity
    key: ClusterKey
    folder: KeyFolder
    company: Company
    heartbeats: NoHeartbeats
    ending: NodeExit
    events: EventLog
    loops: Loops
    name: str

    @property
    def address(self) -> str:
        """host:port of its join port."""
        return f"{LOOPBACK}:{self.joining.state.join_port}"

    def discover(self, other: "Joiner | str") -> None:
        """Finds that node, as by mDNS."""
        address = other if isinstance(other, str) else other.address
        self.joining.asker.discover(address)

    @property
    def code(self) -> str:
        """The digits on its screen."""
        assert self.joining.asker.code is not None, f"{self.name} shows no digits"
        return self.joining.asker.code

    def waiting(self) -> list[PendingRequest]:
        return self.joining.requests.pending()

    def request_of(self, other: "Joiner") -> PendingRequest:
        return next(r for r in self.waiting() if r.party.node == other.identity.node)

    def has_waiting(self, other: "Joiner") -> bool:
        return any(r.party.node == other.identity.node for r in self.waiting())

    async def let_in(self, other: "Joiner", code: str) -> PeerIdentity:
        return await self.joining.approver.let_in(self.request_of(other).id, code)

    @property
    def key_on_disk(self) -> ClusterKey:
        return self.folder.load()

    @property
    def joined(self) -> RestartWithKey | None:
        outcome = self.ending.outcome
        return cast(RestartWithKey, outcome.result()) if outcome.done() else None

    def event_texts(self, kind: str) -> list[str]:
        """The sentences of its events of that kind."""
        return [e.text for e in self.events._events if e.kind == kind]  # pyright: ignore[reportPrivateUsage]


@asynccontextmanager
async def joiner(
    name: str = "node",
    *,
    fresh: bool = True,
    identity: Identity | None = None,
    chip: str = "chip",
    peers: Sequence[str] = (),
) -> AsyncGenerator[Joiner]:
    """A node that listens on a free port of the loopback and has discovered no other yet."""
    with tempfile.TemporaryDirectory() as root:
        folder = KeyFolder(Path(root))
        key = folder.load()
        if not fresh:
            folder.establish()
        own = identity or load_or_create_identity(Path(root))
        company, heartbeats, ending, events = Company(), NoHeartbeats(), NodeExit(), EventLog()
        loops = Loops(events, replace(LOCAL, keep_alive_s=0.1))  # steady after 0.5 s
        credentials = node_credentials(own, key)
        state = JoinState(
            Keyring(folder, key, own, credentials, cluster_fingerprint(key)),
            lambda: pb.NodeFacts(name=name, chip=chip, version="0.1.0", host="127.0.0.1", port=9),
            cast(Cluster, company),
            ending,
            events,
            LOCAL,
        )
        joining = Joining(state, cast(WatchedClient, heartbeats), PendingRequests(), loops)
        _ = joining.listen([LOOPBACK], 0)
        joining.begin(peers)
        try:
            yield Joiner(
                joining, own, key, folder, company, heartbeats, ending, events, loops, name
            )
        finally:
            await joining.close()


@asynccontextmanager
async def asking() -> AsyncGenerator[tuple[Joiner, Joiner]]:
    """A member of a cluster, and a fresh node that waits there to be let in."""
    async with joiner("old", fresh=False) as old, joiner("new") as new:
        new.discover(old)
        await until(lambda: old.has_waiting(new))
        yield old, new


# ------------------------------------------------------------------------------- attackers


class Impostor:
    """A node of another cluster whose frames the test sends one by one."""

    def __init__(self, *, fresh: bool = False, name: str = "impostor") -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.identity = load_or_create_identity(self.folder)
        self.key = ClusterKey(secrets.token_bytes(20))
        self.server_tls, self.client_tls = tls_contexts(
            join_credentials(self.identity), self.folder
        )
        self.fresh = fresh
        self.name = name
        self.claims: str | None = None
        """Another cluster's fingerprint, to send in place of its own."""

    def party(self, **changed: Any) -> PeerIdentity:
        fields: dict[str, Any] = {
            "node": self.identity.node,
            "public_key": proven_public_key(self.identity),
            "cluster": self.claims or cluster_fingerprint(self.key),
            "name": self.name,
            "chip": "chip",
            "version": "0.1.0",
            "protocol": PROTOCOL,
            "address": "127.0.0.1:9",
            "fresh": self.fresh,
            "nonce": secrets.token_bytes(32),
        }
        return PeerIdentity(**{**fields, **changed})

    @asynccontextmanager
    async def calling(
        self, address: str, **changed: Any
    ) -> AsyncGenerator[tuple[JoinConnection, PeerIdentity, PeerIdentity]]:
        """(a connection after both hellos, this party, the other)."""
        async with connect(address, self.client_tls, LOCAL) as line:
            own = self.party(**changed)
            await line.send(hello(own, self.key))
            yield line, own, party_of((await line.receive("hello")).hello, line.peer)

    @asynccontextmanager
    async def listening(
        self,
        attend: Callable[[JoinConnection, PeerIdentity, PeerIdentity], Coroutine[Any, Any, None]],
    ) -> AsyncGenerator[str]:
        """The address of a join port where `attend` has each connection after both hellos."""

        async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = JoinConnection(reader, writer, LOCAL)
            try:
                other = party_of((await line.receive("hello")).hello, line.peer)
                own = self.party()
                await line.send(hello(own, self.key))
                await attend(line, own, other)
            except PeerLost:
                return  # the node under test ended the connection
            finally:
                await line.close()

        server = await asyncio.start_server(welcome, LOOPBACK, 0, ssl=self.server_tls)
        try:
            yield f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


async def asks(line: JoinConnection) -> None:
    """Serves a joiner's request, up to the point where a person would type digits."""
    _ = await line.receive("ask")
    await line.send(pb.JoinFrame(waiting=pb.JoinWaiting()))
