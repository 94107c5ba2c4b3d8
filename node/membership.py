"""Who is in the cluster and who answers. A pure state machine: time comes with each event.

    (unknown) --heard--> alive --1.5 s--> suspect --3.5 s--> dead
                           ^                 |                 |
                           +-----heard-------+------heard------+

A suspect gets no new work; a dead node's stages are lost. Heartbeats come every second, so that
dead means three of them were missed. Only time in which this node listened counts: after a pause
of its own (a blocked loop, SIGSTOP) it must not take the whole cluster for dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

from ..placement.ids import NodeId

SUSPECT_AFTER_S = 1.5
DEAD_AFTER_S = 3.5
FORGET_AFTER_S = 60.0
"""A node that died or left is forgotten then, and with it its incarnation: one that came back with
a clock set back would otherwise be taken for an old message for ever."""

LATE_AFTER_S = 1.0
"""Ticks come twice a second: what a gap has beyond this is this node's own pause."""

Status = Literal["alive", "suspect", "dead"]


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat of that node; a lower incarnation than the known one is an old message.

    The incarnation is fixed when a process starts, and higher than that of the one before.
    """

    node: NodeId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due twice a second."""


@dataclass(frozen=True, slots=True)
class Left:
    """The node said that it goes; its heartbeats that are still under way are old messages."""

    node: NodeId


Event = Heard | Tick | Left


@dataclass(frozen=True, slots=True)
class Joined:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Suspected:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Recovered:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Died:
    node: NodeId


@dataclass(frozen=True, slots=True)
class LeftCluster:
    node: NodeId


Change = Joined | Suspected | Recovered | Died | LeftCluster


@dataclass(slots=True)
class _Peer:
    heard_at: float
    incarnation: int
    status: Status = "alive"


class Membership:
    """The other nodes, as this one hears them."""

    def __init__(self, self_id: NodeId, incarnation: int) -> None:
        self.self_id = self_id
        self.incarnation = incarnation
        self._peers: dict[NodeId, _Peer] = {}
        self._left: dict[NodeId, _Peer] = {}
        self._ticked_at: float | None = None

    def apply(self, event: Event, now: float) -> tuple[Change, ...]:
        """What the event changed; `now` in seconds of a monotonic clock."""
        match event:
            case Heard(node, incarnation):
                return self._heard(node, incarnation, now)
            case Left(node):
                return self._goes(node)
            case Tick():
                self._forgive_own_pause(now)
                return self._passed(now)
            case _:
                assert_never(event)

    def statuses(self) -> Mapping[NodeId, Status]:
        return {node: peer.status for node, peer in self._peers.items()}

    def alive(self) -> frozenset[NodeId]:
        """Those that may take new work."""
        return frozenset(n for n, peer in self._peers.items() if peer.status == "alive")

    def live(self) -> frozenset[NodeId]:
        """Those that are not dead."""
        return frozenset(n for n, peer in self._peers.items() if peer.status != "dead")

    def _heard(self, node: NodeId, incarnation: int, now: float) -> tuple[Change, ...]:
        if node == self.self_id:
            return ()
        left = self._left.get(node)
        if left is not None and incarnation <= left.incarnation:
            return ()
        peer = self._peers.get(node)
        if peer is None:
            _ = self._left.pop(node, None)
            self._peers[node] = _Peer(now, incarnation)
            return (Joined(node),)
        if incarnation < peer.incarnation:
            return ()
        before, restarted = peer.status, incarnation > peer.incarnation
        peer.heard_at, peer.incarnation, peer.status = now, incarnation, "alive"
        if before == "dead":
            return (Joined(node),)
        if restarted:  # its stages went with its last life, however short the gap was
            return (Died(node), Joined(node))
        return (Recovered(node),) if before == "suspect" else ()

    def _goes(self, node: NodeId) -> tuple[Change, ...]:
        peer = self._peers.pop(node, None)
        if peer is None:
            return ()
        self._left[node] = peer
        return (LeftCluster(node),)

    def _forgive_own_pause(self, now: float) -> None:
        if self._ticked_at is not None:
            pause = max(0.0, now - self._ticked_at - LATE_AFTER_S)
            for peer in self._peers.values():
                peer.heard_at = min(now, peer.heard_at + pause)
        self._ticked_at = now

    def _passed(self, now: float) -> tuple[Change, ...]:
        changes: list[Change] = []
        for node, peer in self._peers.items():
            silent = now - peer.heard_at
            if peer.status == "alive" and silent > SUSPECT_AFTER_S:
                peer.status = "suspect"
                changes.append(Suspected(node))
            if peer.status == "suspect" and silent > DEAD_AFTER_S:
                peer.status = "dead"
                changes.append(Died(node))
        self._forget(now)
        return tuple(changes)

    def _forget(self, now: float) -> None:
        for known in (self._peers, self._left):
            for node in [n for n, peer in known.items() if now - peer.heard_at > FORGET_AFTER_S]:
                del known[node]
