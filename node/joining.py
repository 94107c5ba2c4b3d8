"""This node's side of joining: what it tells of itself, whom it asks, and whom it lets in."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..placement.errors import (
    DuplicateIdentity,
    InvalidRequest,
    InvalidSettings,
    JoinRequestNotFound,
    PeerLost,
)
from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .background import background
from .control_server import PROTOCOL
from .events import EventLog
from .facts import MemberFacts
from .join import Party, is_open_proof, open_proof, parse_code, refuse_malformed_code, spaced
from .join_client import Asking, JoinClient
from .join_keys import KeyFolder
from .join_requests import Request
from .join_server import JoinServer
from .join_views import on_the_wire, shown_asking, shown_request
from .join_wire import Refusal, ask_for_hint, join_address, split, tls_contexts
from .trust import (
    ClusterKey,
    Identity,
    cluster_fingerprint,
    join_credentials,
    parse_cluster_key,
    proven_public_key,
)

log = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
"""A fresh node lets nobody in so early: it may see a cluster, or a smaller id, until then."""
LOOK_AT_PEER_S: Final = 5.0
_MAX_COMPLAINTS: Final = 256


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """The cluster key on disk is another one: the node has to be built anew with it."""

    how: Literal["approved", "given", "left"]
    peers: tuple[str, ...] = ()
    """host:port to dial then."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What joining needs of the rest of the node."""

    facts: Callable[[], pb.NodeFacts]
    members: Callable[[], list[MemberFacts]]
    """Alive, this node first."""
    dial: Callable[[str], None]
    decide_elsewhere: Callable[[NodeId, str, str, dict[str, str]], Awaitable[dict[str, Any]]]
    """(node, request's id, "approve" or "deny", body): asks another member, whose request it is."""
    answers: Callable[[NodeId], Awaitable[bool]]
    """Whether the process that is known under the id still does."""
    rekeyed: Callable[[Rekeyed], None]
    give_up: Callable[[DuplicateIdentity], None]
    events: EventLog


class Joining:
    """Holds the join port and the requests, in both directions."""

    def __init__(
        self,
        identity: Identity,
        key: ClusterKey,
        folder: KeyFolder,
        around: Surroundings,
        *,
        open_name: str | None,
    ) -> None:
        self._identity = identity
        self._public_key = proven_public_key(identity)
        self._key = key
        self._fingerprint = cluster_fingerprint(key)
        self._folder = folder
        self._around = around
        self._open_name = open_name
        self._fresh = folder.is_fresh(self._fingerprint)
        self._left = folder.left()
        self._began = time.monotonic()
        self._complaints: set[tuple[str, str]] = set()
        self._looks: list[asyncio.Task[None]] = []
        self._done = False
        server, client = tls_contexts(join_credentials(identity), folder.data_dir)
        self._server = JoinServer(self, server)
        self._client = JoinClient(self, client)
        self.port = 0

    def listen(self, hosts: Sequence[str], port: int) -> int:
        """Returns the join port, which nobody is answered on yet. Raises InvalidSettings."""
        self.port = self._server.start(hosts, port)
        return self.port

    def begin(self, peers: Sequence[str]) -> None:
        """Answers, and looks what is behind `peers`, the control ports that a person named."""
        self._began = time.monotonic()
        self._server.begin()
        self._looks = [background(self._look_at(p), f"the look at {p}") for p in peers]
        if self._open_name is not None:
            log.warning(
                "OPEN: whoever starts a node with the same --open on this network is let into this "
                "cluster without approval, sees prompts and answers and can use this machine"
            )

    async def close(self) -> None:
        for task in self._looks:
            _ = task.cancel()
        _ = await asyncio.gather(*self._looks, return_exceptions=True)
        await self._client.close()
        await self._server.close()

    def see(self, address: str) -> None:
        """A join port of another cluster."""
        self._client.see(address)

    @property
    def fresh(self) -> bool:
        """Whether this node may leave its cluster for another by itself."""
        return self._fresh

    def met_member(self) -> None:
        """Another node is in the cluster: it is established from now on."""
        if self._fresh:
            self._folder.establish()
            self._stay()

    def facts(self) -> list[pb.JoinRequest]:
        """This node's waiting requests, for the other members."""
        return [on_the_wire(request, left) for request, left in self._server.pending()]

    # ----------------------------------------------------------- over HTTP (JoinOperations)

    async def requests(self) -> dict[str, Any]:
        """Who waits to be let in, here or at another member; whom this node asks itself."""
        members = self._around.members()
        data = [
            shown_request(request, member.id, member.facts.name, here=index == 0)
            for index, member in enumerate(members)
            for request in (self.facts() if index == 0 else member.facts.join_requests)
        ]
        return {
            "object": "list",
            "data": data,
            "asking": [shown_asking(each) for each in self._client.asking()],
            "fresh": self._fresh,
            "open": self._open_name is not None,
        }

    async def approve(self, id_: str, code: str) -> dict[str, Any]:
        """Lets the node in that shows these digits; returns when it has the key.

        Raises InvalidRequest, JoinRequestNotFound, PeerLost.
        """
        digits = parse_code(code)
        if digits is None:
            raise refuse_malformed_code(code)
        if (owner := self._owner(id_)) is not None:
            return await self._around.decide_elsewhere(owner, id_, "approve", {"code": digits})
        party = await self._server.approve(id_, digits)
        return {"id": id_, "node": party.node, "name": party.name, "approved": True}

    async def deny(self, id_: str) -> dict[str, Any]:
        """Raises JoinRequestNotFound, PeerLost."""
        if (owner := self._owner(id_)) is not None:
            return await self._around.decide_elsewhere(owner, id_, "deny", {})
        self._server.deny(id_)
        return {"id": id_, "approved": False}

    async def take_key(self, text: str) -> dict[str, Any]:
        """`exo-node join KEY`. Raises InvalidRequest."""
        with _as_request_fault("key"):
            key = parse_cluster_key(text, "the key")
            aside = await asyncio.to_thread(self._folder.take, key)
        if aside is not None:
            self._rekeyed(Rekeyed("given"))
        return {"cluster": cluster_fingerprint(key), "changed": aside is not None}

    async def leave(self) -> dict[str, Any]:
        """`exo-node leave`. Raises InvalidRequest."""
        with _as_request_fault("body"):
            _ = await asyncio.to_thread(self._folder.leave)
        self._rekeyed(Rekeyed("left"))
        return {"left": self._fingerprint}

    # ------------------------------------------------------------- both sides of the port

    def own(self) -> Party:
        facts = self._around.facts()
        return Party(
            node=self._identity.node,
            public_key=self._public_key,
            cluster=self._fingerprint,
            name=facts.name,
            chip=facts.chip[:100],
            version=facts.version,
            protocol=PROTOCOL,
            address=f"{facts.host}:{facts.port}",
            fresh=self._fresh,
            open=self._open_name is not None,
            join_port=self.port,
        )

    def unfit(self, other: Party) -> Refusal | None:
        if other.protocol != PROTOCOL:
            return Refusal(
                "protocol",
                f"{self._around.facts().name} speaks protocol {PROTOCOL} (exo-node "
                f"{self._around.facts().version}) and {other.name} {other.protocol} (exo-node "
                f"{other.version}); install the same version on both",
            )
        if other.node == self._identity.node:
            return self._duplicate(other.node)
        return None

    async def twin_of(self, other: Party) -> Refusal | None:
        members = [member.id for member in self._around.members()[1:]]
        if other.cluster == self._fingerprint or other.node not in members:
            return None
        return self._duplicate(other.node) if await self._around.answers(other.node) else None

    def met(self, other: Party, address: str) -> None:
        if other.fresh or self._is_known(other.cluster, other.node):
            return
        log.info(
            "%s (%s) at %s is of another cluster (%s); to have both in one, run `exo-node leave` "
            "on one of them, or give it the other's key (`exo-node join`)",
            other.name,
            other.node,
            address,
            other.cluster,
        )

    def turned_away(self, address: str, refusal: Refusal) -> None:
        self.refused(address, refusal)
        if refusal.reason == "duplicate":
            self._around.give_up(DuplicateIdentity(refusal.message))

    def refused(self, who: str, refusal: Refusal) -> None:
        if refusal.reason not in ("not_yet", "elsewhere") and not self._is_known(
            who, f"{refusal.reason} {refusal.message}"
        ):
            text = f"{who}: {refusal.message}"
            _ = self._around.events.add("join_refused", text, reason=refusal.reason)

    # ------------------------------------------------------------ letting others in (Approver)

    def not_now(self) -> Refusal | None:
        if self._done:
            return Refusal("not_yet", "this node is about to change its cluster")
        if not self._fresh:
            return None
        if instead := self._client.asks_fresh:
            return Refusal("elsewhere", "this node itself asks to join another one", instead)
        if time.monotonic() < self._began + SETTLE_S:
            return Refusal("not_yet", "this node still looks for other clusters")
        return None

    def is_open_to(self, proof: bytes, transcript: bytes) -> bool:
        name = self._open_name
        return name is not None and is_open_proof(proof, name, transcript)

    def waits(self, request: Request, *, approved: bool) -> None:
        party, code = request.party, spaced(request.code)
        who = f"{party.name} ({party.node}, {party.chip or 'unknown chip'}) at {request.address}"
        if approved:
            log.warning("OPEN: %s is let in without approval, as it gives the same name", who)
            return
        _ = self._around.events.add(
            "join_requested",
            f"{who} asks to join this cluster: if its screen shows {code}, run `exo-node approve "
            f"{code}` or use the dashboard",
            node=party.node,
            code=request.code,
        )

    def admit(self, other: Party) -> pb.JoinApproved:
        self._stay()
        others = [m.facts for m in self._around.members() if m.id != other.node]
        peers = [f"{facts.host}:{facts.port}" for facts in others]
        return pb.JoinApproved(key=self._key.text, peers=peers)

    def admitted(self, other: Party, *, stored: bool) -> None:
        who = f"{other.name} ({other.node})"
        if stored:
            self._folder.establish()
            text = f"{who} was let into the cluster"
            _ = self._around.events.add("join_approved", text, node=other.node)
            return
        log.warning("%s was approved, and went away before it had the key", who)
        # Nobody came: it may still be this node that joins another cluster.
        self._fresh = self._folder.is_fresh(self._fingerprint)
        self._client.resume()

    # --------------------------------------------------------------- asking others (Joiner)

    def known(self, other: Party) -> None:
        self._around.dial(other.address)

    def left(self, cluster: str) -> bool:
        return cluster in self._left

    def proof(self, transcript: bytes) -> bytes:
        return b"" if self._open_name is None else open_proof(self._open_name, transcript)

    def wants(self) -> None:
        if self._fresh:
            self._server.send_elsewhere()

    def shows(self, asking: Asking) -> None:
        approver, code = asking.approver, spaced(asking.code)
        _ = self._around.events.add(
            "join_requested",
            f"this node asks to join the cluster of {approver.name} ({approver.node}) at "
            f"{asking.address} and shows {code}: if that node shows the same, run there "
            f"`exo-node approve {code}`, or use its dashboard",
            node=approver.node,
            code=asking.code,
        )

    async def take(self, key: ClusterKey) -> None:
        _ = await asyncio.to_thread(self._folder.take, key)

    def taken(self, approver: Party, peers: list[str]) -> None:
        text = f"this node joins the cluster of {approver.name} ({approver.cluster})"
        _ = self._around.events.add("join_approved", text, node=approver.node)
        self._rekeyed(Rekeyed("approved", tuple(dict.fromkeys([approver.address, *peers]))))

    # -------------------------------------------------------------------------- inside

    def _stay(self) -> None:
        if self._fresh:
            self._fresh = False
            if self._open_name is None:
                self._client.withdraw()

    def _rekeyed(self, news: Rekeyed) -> None:
        self._done = True
        self._around.rekeyed(news)

    async def _look_at(self, peer: str) -> None:
        """A control port that a person named: of another cluster, it tells its join port."""
        host, _ = split(peer)
        while True:
            try:
                hint = await ask_for_hint(peer)
            except PeerLost:
                hint = None
            if hint is not None and hint.cluster != self._fingerprint:
                self._client.see(join_address(host, hint.join_port))
            await asyncio.sleep(LOOK_AT_PEER_S)

    def _owner(self, id_: str) -> NodeId | None:
        """The other member at which a request waits; None: it is this node's, or nobody's."""
        for member in self._around.members()[1:]:
            if any(request.id == id_ for request in member.facts.join_requests):
                return member.id
        if all(request.id != id_ for request, _ in self._server.pending()):
            raise JoinRequestNotFound(
                "no node asks to join under that id any more; `exo-node nodes` lists who does",
                param="id",
            )
        return None

    def _duplicate(self, node: NodeId) -> Refusal:
        return Refusal(
            "duplicate",
            f"another process with the node id {node} runs already; if the data folder of this "
            "one is a copy, remove node.key from it and start it again",
        )

    def _is_known(self, who: str, what: str) -> bool:
        """Whether it was told before: a line for each, and not for each attempt."""
        if (who, what) in self._complaints or len(self._complaints) >= _MAX_COMPLAINTS:
            return True
        self._complaints.add((who, what))
        return False


@contextmanager
def _as_request_fault(param: str) -> Generator[None]:
    """What is wrong with this node's settings is, over HTTP, wrong with the request."""
    try:
        yield
    except InvalidSettings as fault:
        raise InvalidRequest(fault.message, param=param) from fault
