"""The members of the cluster and their status. A pure state machine: time comes with each call.

    (unknown) --heartbeat--> alive --1.5 s, or another's view--> suspect --3.5 s--> dead
                               ^                                    |                |
                               +---------heartbeat------------------+                |
                               +---------heartbeat with a higher incarnation---------+

A node whose address refuses connections, twice, has no process there any more: without a heartbeat
for 1.25 s it is dead.

A suspect gets no new work; a dead node's stages are lost. Heartbeats come every second, so that
dead means three of them were missed. Only time in which this node listened counts: after a pause
of its own (a blocked loop, SIGSTOP) it must not take the whole cluster for dead.

Heartbeats also contain their sender's view of each node, with its last incarnation. A node whose
heartbeats reach others does not die here; a silent one is suspected earlier where others suspect
it; and a node that is suspected or taken for dead refutes that by a higher incarnation. A dead
node returns only with one: it has then received the views that it missed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...placement.ids import NodeId
from ..machine.timing import Timing

MAX_INCARNATION = 2**62
"""The highest that a heartbeat may carry; only a wrong message can bring it about."""

Status = Literal["alive", "suspect", "dead"]


@dataclass(frozen=True, slots=True)
class View:
    """A sender's view of a node: `alive` means that the node's heartbeats reach the sender."""

    node: NodeId
    incarnation: int
    status: Status


@dataclass(frozen=True, slots=True)
class Joined:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Suspected:
    """`by` sent the suspicion; None where the node's silence caused it."""

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
    """This node was suspected or taken for dead by `by`, and refutes that."""

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
    """Suspected by another node's view: a heartbeat alone does not clear that, a higher
    incarnation does."""
    acked_by_others: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    """When each of the others last sent an `alive` view of it."""
    refused_at: float | None = None
    """When its address first refused a connection since its last heartbeat."""
    refused_again: bool = False


class Membership:
    """The other nodes, by their heartbeats and the views in them.

    Methods that take `now` (seconds of a monotonic clock) return the changes that they cause.
    """

    def __init__(self, self_id: NodeId, incarnation: int, timing: Timing) -> None:
        """`incarnation`: higher than the process before had; else a view of others raises it."""
        self.self_id = self_id
        self.incarnation = incarnation
        self._timing = timing
        self._peers: dict[NodeId, _Peer] = {}
        self._left: dict[NodeId, _Peer] = {}
        self._ticked_at: float | None = None

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

    def record_heartbeat(
        self, node: NodeId, incarnation: int, boot_id: int, now: float
    ) -> tuple[Change, ...]:
        """A lower incarnation than the last one is an old message.

        `boot_id` names the process: another one is a restart, whatever the incarnations.
        """
        if node == self.self_id:
            return ()
        former = self._left.get(node)
        # One process leaves once: a refutation that was under way is an old message too.
        if former and (boot_id == former.boot_id or incarnation <= former.incarnation):
            return ()
        peer = self._peers.get(node)
        if peer is None:
            _ = self._left.pop(node, None)
            self._peers[node] = _Peer(now, incarnation, boot_id)
            return (Joined(node),)
        before, restarted = peer.status, boot_id != peer.boot_id
        refuted = incarnation > peer.incarnation
        if incarnation < peer.incarnation or (before == "dead" and not refuted):
            return ()
        peer.heard_at, peer.incarnation, peer.boot_id = now, incarnation, boot_id
        peer.refused_at, peer.refused_again = None, False
        if peer.suspected_by_others and not refuted:
            return ()
        peer.status, peer.suspected_by_others = "alive", False
        if before == "dead":
            return (Joined(node),)
        if restarted:  # its stages ended with its last process, however short the gap was
            return (Died(node, restarted=True), Joined(node))
        return (Recovered(node),) if before == "suspect" else ()

    def record_views(self, sender: NodeId, views: Iterable[View], now: float) -> tuple[Change, ...]:
        """The views of the others and of this node in a heartbeat of `sender`."""
        return tuple(change for view in views for change in self._on_view(sender, view, now))

    def _on_view(self, sender: NodeId, view: View, now: float) -> tuple[Change, ...]:
        if view.node == self.self_id:
            return self._refute(sender, view)
        peer = self._peers.get(view.node)
        if peer is None or view.incarnation < peer.incarnation or view.node == sender:
            return ()
        if view.status == "alive":
            peer.acked_by_others[sender] = now
            return ()
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

    def record_refusal(self, node: NodeId, now: float) -> tuple[Change, ...]:
        """The node's machine answers and refuses connections at the node's address."""
        peer = self._peers.get(node)
        if peer is None:
            return ()
        if peer.refused_at is None:
            peer.refused_at = now
        elif now - peer.refused_at >= self._timing.refused_again_s:
            peer.refused_again = True
        return self._update(now)

    def remove(self, node: NodeId) -> tuple[Change, ...]:
        """The node leaves; its heartbeats that are still under way are old messages."""
        peer = self._peers.pop(node, None)
        if peer is None:
            return ()
        self._left[node] = peer
        return (LeftCluster(node),)

    def tick(self, now: float) -> tuple[Change, ...]:
        """Due twice a second or more often."""
        if self._ticked_at is not None:
            pause = max(0.0, now - self._ticked_at - self._timing.heartbeat_s)
            for peer in self._peers.values():
                peer.heard_at = min(now, peer.heard_at + pause)
        self._ticked_at = now
        return self._update(now)

    def _update(self, now: float) -> tuple[Change, ...]:
        changes: list[Change] = []
        timing = self._timing
        for node, peer in self._peers.items():
            silent = now - peer.heard_at
            refused = peer.refused_at is not None
            doubtful = silent > (timing.doubt_after_s if refused else timing.suspect_after_s)
            if peer.status == "alive" and doubtful:
                peer.status = "suspect"
                changes.append(Suspected(node))
            patience_s = timing.refused_dead_after_s if peer.refused_again else timing.dead_after_s
            is_silent = silent > patience_s and not self._acked_by_others(peer, now)
            if peer.status == "suspect" and is_silent:
                peer.status, peer.suspected_by_others = "dead", False
                changes.append(Died(node))
        self._forget(now)
        return tuple(changes)

    def _acked_by_others(self, peer: _Peer, now: float) -> bool:
        """Whether a node that is alive itself sent an `alive` view of it lately."""
        alive = self.alive()
        lately = self._timing.suspect_after_s
        recent = (n for n, at in peer.acked_by_others.items() if now - at <= lately)
        return any(node in alive for node in recent)

    def _forget(self, now: float) -> None:
        for peers in (self._peers, self._left):
            for node, peer in list(peers.items()):
                silent = now - peer.heard_at
                if silent > self._timing.forget_after_s and peer.status != "suspect":
                    del peers[node]
