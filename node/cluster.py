"""The live cluster as this node sees it: dials candidates, exchanges heartbeats, names the head."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..placement.errors import ExoNodeError, PeerLost
from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .background import background
from .control_client import ControlClient
from .control_server import PROTOCOL
from .election import Election
from .facts import MemberFacts
from .membership import (
    Change,
    Died,
    Heard,
    Joined,
    Left,
    LeftCluster,
    Membership,
    Recovered,
    Suspected,
    Tick,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_BACKOFF_S = 10.0
STAGE_GRACE_S = 3.0
"""A stage that a node's heartbeats do not name for this long, once it was ready, is lost."""


@dataclass(slots=True)
class Dial:
    """An address that is worth dialling, and how that went."""

    address: str
    node: NodeId | None
    backoff_s: float = HEARTBEAT_S
    complaint: str = ""


@dataclass(slots=True)
class Member:
    """Another node and its last heartbeat."""

    address: str
    beat: pb.Heartbeat
    missing_since: dict[tuple[str, int], float] = field(
        default_factory=dict[tuple[str, int], float]
    )


class Cluster:
    """Owns membership and election; everything runs on the node's event loop."""

    def __init__(
        self,
        self_facts: Callable[[], pb.NodeFacts],
        states: Callable[[], list[pb.PlacementState]],
        client: ControlClient,
        membership: Membership,
        election: Election,
        on_lost: Callable[[NodeId, str], None],
        fingerprint: str,
    ) -> None:
        """`states` gives this node's stages; `on_lost` hears of nodes that died or left."""
        self._self_facts = self_facts
        self._states = states
        self._client = client
        self._membership = membership
        self._election = election
        self._on_lost = on_lost
        self._fingerprint = fingerprint
        self._members: dict[NodeId, Member] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self.self_id = NodeId(self_facts().id)

    def start(self) -> None:
        self._ticker = background(self._tick(), "the membership's clock")

    async def close(self) -> None:
        """Says goodbye, so that the others need not wait for a timeout."""
        farewell = self._beat()
        farewell.leaving = True
        goodbyes = [
            self._client.exchange(member.address, node, farewell)
            for node, member in self._members.items()
            if node in self._membership.live()
        ]
        _ = await asyncio.gather(*goodbyes, return_exceptions=True)
        tasks = [*self._dials.values(), *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    def dial(self, address: str, node: NodeId | None = None) -> None:
        """Begins to exchange heartbeats with whoever listens there; known addresses are ignored."""
        own = self._self_facts()
        if node == self.self_id or address == f"{own.host}:{own.port}" or address in self._dials:
            return
        heartbeats = self._exchange_for_ever(Dial(address, node))
        self._dials[address] = background(heartbeats, f"the exchange with {address}")

    def heard(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        """A heartbeat that came in; the answer is this node's own."""
        if beat.leaving:
            self._tell(self._membership.apply(Left(sender), time.monotonic()))
            _ = self._members.pop(sender, None)
            return self._beat()
        address = f"{beat.sender.host}:{beat.sender.port}"
        known = self._members.get(sender)
        moved = known is not None and known.beat.sender.port != beat.sender.port
        self._note(sender, address if known is None or moved else known.address, beat)
        self.dial(address, sender)
        return self._beat()

    @property
    def head(self) -> NodeId:
        return self._election.head(self._alive_ids())

    @property
    def is_head(self) -> bool:
        return self.head == self.self_id

    def members(self) -> list[MemberFacts]:
        """Nodes that may take new work: this one and those that are alive, not suspect."""
        alive = self._membership.alive()
        others = [m.beat for node, m in self._members.items() if node in alive]
        return [
            MemberFacts(self._self_facts(), self._states()),
            *(MemberFacts(beat.sender, beat.placements) for beat in others),
        ]

    def address(self, node: NodeId) -> str:
        """host:port of another node's control server. Raises PeerLost."""
        member = self._members.get(node)
        if member is None:
            raise PeerLost(f"node {node} is not in the cluster")
        return member.address

    def missing_stages(self, expected: Iterable[tuple[NodeId, str, int]]) -> list[tuple[str, int]]:
        """Of the (node, placement, stage) that should be up, those gone for STAGE_GRACE_S."""
        gone: list[tuple[str, int]] = []
        now = time.monotonic()
        for node, placement, stage in expected:
            member = self._members.get(node)
            if member is None:
                continue
            key = (placement, stage)
            if any((s.placement, s.stage) == key for s in member.beat.placements):
                _ = member.missing_since.pop(key, None)
            elif now - member.missing_since.setdefault(key, now) > STAGE_GRACE_S:
                gone.append(key)
        return gone

    def describe(self, version: str) -> dict[str, Any]:
        """The body of `GET /v1/cluster`."""
        status = self._membership.statuses()
        head = self.head
        nodes = [_node(self._self_facts(), self._states(), "alive", head, itself=True)]
        nodes += [
            _node(m.beat.sender, m.beat.placements, status.get(node, "dead"), head, itself=False)
            for node, m in sorted(self._members.items())
        ]
        return {
            "self": self.self_id,
            "head": head,
            "term": self._election.term,
            "cluster": self._fingerprint,
            "version": version,
            "nodes": nodes,
        }

    def _beat(self) -> pb.Heartbeat:
        return pb.Heartbeat(
            protocol=PROTOCOL,
            sender=self._self_facts(),
            incarnation=self._membership.incarnation,
            term=self._election.term,
            head=self.head,
            peers=[member.address for member in self._members.values()],
            placements=self._states(),
        )

    async def _exchange_for_ever(self, dial: Dial) -> None:
        while True:
            try:
                beat = await self._client.exchange(dial.address, dial.node, self._beat())
            except ExoNodeError as fault:
                self._complain(dial, fault)
                await asyncio.sleep(dial.backoff_s)
                dial.backoff_s = min(2 * dial.backoff_s, MAX_BACKOFF_S)
                continue
            node = NodeId(beat.sender.id)
            if node == self.self_id:
                return  # one of our own addresses, under a name we did not know
            dial.node, dial.backoff_s, dial.complaint = node, HEARTBEAT_S, ""
            self._note(node, dial.address, beat)
            for address in beat.peers:
                self.dial(address)
            await asyncio.sleep(HEARTBEAT_S)

    def _note(self, node: NodeId, address: str, beat: pb.Heartbeat) -> None:
        known = self._members.get(node)
        if known is None:
            self._members[node] = Member(address, beat)
        else:
            known.beat, known.address = beat, address
        changes = self._membership.apply(Heard(node, beat.incarnation), time.monotonic())
        self._tell(changes)

    def _complain(self, dial: Dial, fault: ExoNodeError) -> None:
        """Once for each kind of trouble: a node that is off for a night must not fill the log."""
        if dial.complaint != fault.code:
            dial.complaint = fault.code
            log.warning("%s: %s", dial.address, fault.message)

    async def _tick(self) -> None:
        while True:
            self._tell(self._membership.apply(Tick(), time.monotonic()))
            await asyncio.sleep(HEARTBEAT_S / 2)

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            name = self._name(change.node)
            match change:
                case Joined():
                    log.info("%s joined", name)
                case Suspected():
                    log.warning("%s does not answer; it gets no new work", name)
                case Recovered():
                    log.info("%s answers again", name)
                case Died():
                    log.warning("%s is dead", name)
                    self._on_lost(change.node, f"{name} does not answer any more")
                case LeftCluster():
                    log.info("%s left", name)
                    self._on_lost(change.node, f"{name} left the cluster")
        if changes:
            log.debug("head is %s", self.head)

    def _name(self, node: NodeId) -> str:
        member = self._members.get(node)
        return f"{member.beat.sender.name} ({node})" if member else node

    def _alive_ids(self) -> list[NodeId]:
        return [self.self_id, *self._membership.live()]


def _node(
    facts: pb.NodeFacts,
    states: Iterable[pb.PlacementState],
    status: str,
    head: NodeId,
    *,
    itself: bool,
) -> Mapping[str, Any]:
    return {
        "id": facts.id,
        "name": facts.name,
        "version": facts.version,
        "host": facts.host,
        "port": facts.port,
        "http_host": facts.http_host,
        "http_port": facts.http_port,
        "chip": facts.chip,
        "backend": facts.backend,
        "memory_bytes": facts.memory_bytes,
        "memory_bandwidth": facts.memory_bandwidth,
        "status": status,
        "self": itself,
        "head": facts.id == head,
        "stages": [_stage(state) for state in states],
    }


def _stage(state: pb.PlacementState) -> Mapping[str, Any]:
    return {
        "placement": state.placement,
        "model": state.model,
        "stage": state.stage,
        "layers": [state.first_layer, state.end_layer],
        "status": state.status,
        "weight_bytes": state.weight_bytes,
        "checkpoint_bytes_read": state.checkpoint_bytes_read,
        "cache_bytes": state.cache_bytes,
        "peak_memory_bytes": state.peak_memory_bytes,
        "live_requests": state.live_requests,
        "progress": state.progress,
        "pid": state.pid,
        "error": state.error or None,
    }
