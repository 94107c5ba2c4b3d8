"""The members of the cluster and their status. A pure state machine: time comes with each event.

    (unknown) --heard--> alive --1.5 s, or told--> suspect --3.5 s--> dead
                           ^                          |                 |
                           +---------heard------------+                 |
                           +---------heard with a higher incarnation----+

A node whose address refuses connections, twice, has no process there any more: where it was not
heard for 1.25 s either, it is dead.

A suspect gets no new work; a dead node's stages are lost. Heartbeats come every second, so that
dead means three of them were missed. Only time in which this node listened counts: after a pause
of its own (a blocked loop, SIGSTOP) it must not take the whole cluster for dead.

Heartbeats also say how their sender sees each node, with the incarnation it knows. So a node that
others hear is not taken for dead by one that does not; a silent one is suspected earlier where
others suspect it; and a node that learns that it is suspected or taken for dead refutes that by a
higher incarnation. One that was dead counts again from then on: it has learnt what it missed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, assert_never

from ...placement.ids import NodeId
from ..machine.timing import Timing

MAX_INCARNATION = 2**62
"""The highest that a heartbeat may carry; only a wrong message can bring it about."""

Status = Literal["alive", "suspect", "dead"]


@dataclass(frozen=True, slots=True)
class View:
    """How the sender of a heartbeat sees a node: `alive` is heard by itself, not by hearsay."""

    node: NodeId
    incarnation: int
    status: Status


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat of that node; a lower incarnation than the known one is an old message.

    `boot_id` names the process: another one is a restart, whatever the incarnations.
    """

    node: NodeId
    incarnation: int
    boot_id: int = 0


@dataclass(frozen=True, slots=True)
class Gossip:
    """The views of the others and of this node in the heartbeat of `sender`."""

    sender: NodeId
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due twice a second or more often."""


@dataclass(frozen=True, slots=True)
class Left:
    """The node said that it goes; its heartbeats that are still under way are old messages."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Refused:
    """That node's machine answers and refuses connections at its address."""

    node: NodeId


Event = Heard | Gossip | Tick | Left | Refused


@dataclass(frozen=True, slots=True)
class Joined:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Suspected:
    """`by` told of it; None where this node's own silence did."""

    node: NodeId
    by: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Died:
    """`restarted`: its process was replaced by another one, which joins at once."""

    node: NodeId
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class LeftCluster:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Refuted:
    """This node was suspected, or taken for dead, and says that it is not."""

    node: NodeId
    by: NodeId
    was: Status


Change = Joined | Suspected | Recovered | Died | LeftCluster | Refuted


@dataclass(slots=True)
class _Peer:
    heard_at: float
    incarnation: int
    boot_id: int
    status: Status = "alive"
    suspected_by_others: bool = False
    """Suspected on another's word: it must refute that, being heard is not enough."""
    acked_by_others: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    """When each of the others last said that it hears this node."""
    refused_at: float | None = None
    """When its address first refused a connection since it was last heard."""
    refused_again: bool = False


class Membership:
    """The other nodes, as this one and those it hears see them."""

    def __init__(self, self_id: NodeId, incarnation: int, timing: Timing) -> None:
        """`incarnation` should be higher than that of the process before; if not, others say so."""
        self.self_id = self_id
        self.incarnation = incarnation
        self._timing = timing
        self._peers: dict[NodeId, _Peer] = {}
        self._left: dict[NodeId, _Peer] = {}
        self._ticked_at: float | None = None

    def apply(self, event: Event, now: float) -> tuple[Change, ...]:
        """The changes that the event causes; `now` in seconds of a monotonic clock."""
        match event:
            case Heard():
                return self._on_heartbeat(event, now)
            case Gossip(sender, views):
                return tuple(c for view in views for c in self._on_view(sender, view, now))
            case Left(node):
                return self._goes(node)
            case Refused(node):
                return self._refused(node, now)
            case Tick():
                self._forgive_own_pause(now)
                return self._passed(now)
            case _:
                assert_never(event)

    def statuses(self) -> Mapping[NodeId, Status]:
        return {node: peer.status for node, peer in self._peers.items()}

    def alive(self) -> frozenset[NodeId]:
        """Nodes that may take new work."""
        return frozenset(n for n, peer in self._peers.items() if peer.status == "alive")

    def live(self) -> frozenset[NodeId]:
        """Nodes that are not dead."""
        return frozenset(n for n, peer in self._peers.items() if peer.status != "dead")

    def is_current(self, node: NodeId, incarnation: int) -> bool:
        """Whether heartbeats of that incarnation count: not outdated, and not of a dead node."""
        peer = self._peers.get(node)
        return peer is not None and peer.status != "dead" and incarnation >= peer.incarnation

    def views(self) -> tuple[View, ...]:
        """The views in this node's heartbeats; nodes that left count as dead."""
        present = [View(n, peer.incarnation, peer.status) for n, peer in self._peers.items()]
        absent = ((n, p) for n, p in self._left.items() if n not in self._peers)
        return (*present, *(View(n, peer.incarnation, "dead") for n, peer in absent))

    def _on_heartbeat(self, beat: Heard, now: float) -> tuple[Change, ...]:
        node = beat.node
        if node == self.self_id:
            return ()
        former = self._left.get(node)
        # One process leaves once: a refutation that was under way is an old message too.
        if former and (beat.boot_id == former.boot_id or beat.incarnation <= former.incarnation):
            return ()
        peer = self._peers.get(node)
        if peer is None:
            _ = self._left.pop(node, None)
            self._peers[node] = _Peer(now, beat.incarnation, beat.boot_id)
            return (Joined(node),)
        newer = beat.incarnation > peer.incarnation
        if beat.incarnation < peer.incarnation or (peer.status == "dead" and not newer):
            return ()
        return self._alive(node, peer, beat, now)

    def _alive(self, node: NodeId, peer: _Peer, beat: Heard, now: float) -> tuple[Change, ...]:
        before, restarted = peer.status, beat.boot_id != peer.boot_id
        refuted = beat.incarnation > peer.incarnation
        peer.heard_at, peer.incarnation, peer.boot_id = now, beat.incarnation, beat.boot_id
        peer.refused_at, peer.refused_again = None, False
        if peer.suspected_by_others and not refuted:
            return ()
        peer.status, peer.suspected_by_others = "alive", False
        if before == "dead":
            return (Joined(node),)
        if restarted:  # its stages went with its last life, however short the gap was
            return (Died(node, restarted=True), Joined(node))
        return (Recovered(node),) if before == "suspect" else ()

    def _on_view(self, sender: NodeId, view: View, now: float) -> tuple[Change, ...]:
        if view.node == self.self_id:
            return self._refute(sender, view)
        peer = self._peers.get(view.node)
        if peer is None or view.incarnation < peer.incarnation or view.node == sender:
            return ()
        match view.status:
            case "alive":
                peer.acked_by_others[sender] = now
                return ()
            case "suspect" | "dead":
                _ = peer.acked_by_others.pop(sender, None)
        if peer.status != "alive" or now - peer.heard_at <= self._timing.doubt_after_s:
            return ()
        if peer.incarnation >= MAX_INCARNATION:
            return ()  # it could not refute that
        peer.status, peer.suspected_by_others = "suspect", True
        return (Suspected(view.node, by=sender),)

    def _refute(self, sender: NodeId, view: View) -> tuple[Change, ...]:
        """A higher incarnation of this node than its own is that of an earlier process."""
        outdated = view.status != "alive" and view.incarnation == self.incarnation
        if view.incarnation <= self.incarnation and not outdated:
            return ()
        self.incarnation = min(view.incarnation + 1, MAX_INCARNATION)
        return (Refuted(self.self_id, sender, view.status),) if view.status != "alive" else ()

    def _refused(self, node: NodeId, now: float) -> tuple[Change, ...]:
        peer = self._peers.get(node)
        if peer is None:
            return ()
        if peer.refused_at is None:
            peer.refused_at = now
        elif now - peer.refused_at >= self._timing.refused_again_s:
            peer.refused_again = True
        return self._passed(now)

    def _goes(self, node: NodeId) -> tuple[Change, ...]:
        peer = self._peers.pop(node, None)
        if peer is None:
            return ()
        self._left[node] = peer
        return (LeftCluster(node),)

    def _forgive_own_pause(self, now: float) -> None:
        if self._ticked_at is not None:
            pause = max(0.0, now - self._ticked_at - self._timing.heartbeat_s)
            for peer in self._peers.values():
                peer.heard_at = min(now, peer.heard_at + pause)
        self._ticked_at = now

    def _passed(self, now: float) -> tuple[Change, ...]:
        changes: list[Change] = []
        timing = self._timing
        for node, peer in self._peers.items():
            silent = now - peer.heard_at
            refused = peer.refused_at is not None
            doubtful = silent > (timing.doubt_after_s if refused else timing.suspect_after_s)
            if peer.status == "alive" and doubtful:
                peer.status = "suspect"
                changes.append(Suspected(node))
            over = silent > (
                timing.refused_dead_after_s if peer.refused_again else timing.dead_after_s
            )
            if peer.status == "suspect" and over and not self._acked_by_others(peer, now):
                peer.status, peer.suspected_by_others = "dead", False
                changes.append(Died(node))
        self._forget(now)
        return tuple(changes)

    def _acked_by_others(self, peer: _Peer, now: float) -> bool:
        """Whether a node that is alive itself said lately that it hears this one."""
        alive = self.alive()
        lately = self._timing.suspect_after_s
        recent = (n for n, at in peer.acked_by_others.items() if now - at <= lately)
        return any(node in alive for node in recent)

    def _forget(self, now: float) -> None:
        for peers in (self._peers, self._left):
            for node in _silent(peers.items(), now, self._timing.forget_after_s):
                del peers[node]


def _silent(
    peers: Iterable[tuple[NodeId, _Peer]], now: float, longer_than_s: float
) -> list[NodeId]:
    return [
        node
        for node, peer in peers
        if now - peer.heard_at > longer_than_s and peer.status != "suspect"
    ]
