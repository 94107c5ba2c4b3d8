"""Joining put together with the rest of a node: watched heartbeats, members' requests, the end."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from ..placement.errors import DuplicateIdentity, ExoNodeError, PeerLost, from_code
from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .background import background
from .control_client import Channels, ControlClient
from .control_server import PROTOCOL
from .discovery import Candidate
from .events import EventLog
from .facts import MemberFacts
from .join_api import JOIN_PREFIX
from .join_keys import KeyFolder
from .join_twins import Twins
from .join_wire import Refusal
from .joining import Joining, Rekeyed, Surroundings
from .trust import ClusterKey, Identity, cluster_fingerprint

log = logging.getLogger(__name__)

EXIT_DUPLICATE = 3
"""The exit status of a node whose id is another process's."""
_BORN = time.monotonic()

Outcome = Rekeyed | int
"""Why a node ends by itself: to be built anew with another key, or with that exit status."""


class Members(Protocol):
    """What joining needs of `Cluster`."""

    def members(self) -> list[MemberFacts]: ...

    def address(self, node: NodeId) -> str: ...

    def dial(self, address: str, node: NodeId | None = None) -> None: ...


class WatchedClient(ControlClient):
    """Heartbeats go through here, so that a second process with a known id is noticed."""

    def __init__(self, channels: Channels, joining: "NodeJoining") -> None:
        super().__init__(channels)
        self._joining = joining
        self._last: pb.Heartbeat | None = None

    async def exchange(self, address: str, node: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        self._last = beat
        try:
            reply = await super().exchange(address, node, beat)
        except DuplicateIdentity as fault:
            self._joining.give_up(fault)
            raise
        self._joining.heard(reply)
        self._joining.was_accepted(NodeId(reply.sender.id))
        return reply

    async def life_at(self, address: str, node: NodeId) -> int | None:
        """The life of the process that answers there under that id; None where nobody does."""
        if self._last is None:
            return None
        try:
            return (await super().exchange(address, node, self._last)).life
        except ExoNodeError:
            return None  # whatever it is, it is no node of this cluster that answers


class NodeJoining:
    """What `Node` holds of joining."""

    def __init__(
        self,
        identity: Identity,
        key: ClusterKey,
        folder: KeyFolder,
        events: EventLog,
        facts: Callable[[], pb.NodeFacts],
        *,
        open_name: str | None,
    ) -> None:
        self._id = identity.node
        self._facts = facts
        self._cluster_id = cluster_fingerprint(key)
        self._accepted = False
        self._meeting: list[asyncio.Task[None]] = []
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        around = Surroundings(
            facts=facts,
            members=lambda: self._cluster.members(),
            dial=lambda address: self._cluster.dial(address),
            decide_elsewhere=self._decide_elsewhere,
            answers=self._answers,
            rekeyed=self._end,
            give_up=self.give_up,
            events=events,
        )
        self.service = Joining(identity, key, folder, around, open_name=open_name)

    def client(self, channels: Channels, life: int) -> ControlClient:
        """Through which this node's heartbeats are to go; `life` is that of its own."""
        self._life = life
        self._client = WatchedClient(channels, self)
        self._twins = Twins(self._id, life, _uptime_ms, self._client.life_at, self.give_up)
        return self._client

    def listen(self, hosts: Sequence[str], grpc_port: int) -> int:
        """The join port: the one after the node-to-node port, a free one where that is taken."""
        return self.service.listen(hosts, grpc_port + 1 if 0 < grpc_port < 65535 else 0)

    @property
    def port(self) -> int:
        return self.service.port

    def begin(self, cluster: Members, peers: Sequence[str]) -> None:
        """`peers`: control ports that a person named."""
        self._cluster = cluster
        self.service.begin(peers)

    def tell(self, facts: pb.NodeFacts) -> pb.NodeFacts:
        """`facts` with what the others are told of joining."""
        facts.uptime_ms = _uptime_ms()
        facts.join_requests.extend(self.service.facts())
        return facts

    def heard(self, beat: pb.Heartbeat) -> None:
        """A heartbeat of an authenticated sender. Raises DuplicateIdentity and PeerLost."""
        try:
            self._twins.check(beat)
        except DuplicateIdentity as fault:
            where = f"{beat.sender.host}:{beat.sender.port}"
            self.service.refused(where, Refusal("duplicate", fault.message))
            raise
        if beat.sender.id != self._id and not beat.leaving:
            self.service.met_member()

    def was_accepted(self, by: NodeId) -> None:
        """Another node takes this one for a member."""
        self._accepted = self._accepted or by != self._id

    def found(self, candidate: Candidate) -> None:
        """A node of another cluster, or another process with this node's id."""
        if candidate.node == self._id and candidate.cluster == self._cluster_id:
            self._meeting.append(background(self._meet(candidate.address), "meeting a twin"))
        elif candidate.join_address is not None:
            self.service.see(candidate.join_address)

    async def close(self) -> None:
        for task in self._meeting:
            _ = task.cancel()
        _ = await asyncio.gather(*self._meeting, return_exceptions=True)
        await self.service.close()

    def give_up(self, fault: DuplicateIdentity) -> None:
        """This process is the second one: it ends, unless others know it as their member."""
        if self.outcome.done():
            return
        if self._accepted:
            log.error("%s", fault.message)
            return
        log.error("this node ends: %s", fault.message)
        self._end(EXIT_DUPLICATE)

    def _end(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    async def _meet(self, address: str) -> None:
        """A process that announces this node's own id: whichever is younger gives up."""
        facts = self._facts()
        beat = pb.Heartbeat(protocol=PROTOCOL, sender=facts, life=self._life)
        try:
            _ = await self._client.exchange(address, self._id, beat)
        except PeerLost:
            log.debug("nobody answers at %s, which announces this node's id", address)
        except ExoNodeError as fault:
            log.warning("%s: %s", address, fault.message)

    async def _answers(self, node: NodeId) -> bool:
        try:
            address = self._cluster.address(node)
        except PeerLost:
            return False
        return await self._client.life_at(address, node) is not None

    async def _decide_elsewhere(
        self, node: NodeId, id_: str, deed: str, body: dict[str, str]
    ) -> dict[str, Any]:
        request = pb.HttpRequest(
            method="POST",
            path=f"{JOIN_PREFIX}/requests/{id_}/{deed}",
            body=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        status, content = 0, b""
        async with aclosing(self._client.http(self._cluster.address(node), node, request)) as news:
            async for chunk in news:
                status, content = status or chunk.status, content + chunk.body
        answer: dict[str, Any] = json.loads(content)
        if status == 200:
            return answer
        fault = answer["error"]
        raise from_code(fault["code"], fault["message"], fault["param"])


def _uptime_ms() -> int:
    return round(1000 * (time.monotonic() - _BORN))
