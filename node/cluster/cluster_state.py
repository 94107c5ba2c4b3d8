"""Membership and election of one node, as one pure state machine.

Heartbeats go in, changes come out; time comes with each call, in seconds of a monotonic clock.
`node/cluster/cluster.py` runs it over the network, the tests over simulated time.
"""

from dataclasses import dataclass

from ...placement.ids import NodeId
from ..machine.timing import Timing
from . import election, membership
from .election import Election, LeaderClaim, TermStore
from .membership import Died, LeftCluster, Membership, View

Change = membership.Change | election.Change


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The part of a heartbeat that membership and election use."""

    sender: NodeId
    boot_id: int
    """The same for all heartbeats of one process."""
    incarnation: int
    claim: LeaderClaim
    views: tuple[View, ...] = ()
    draining: bool = False
    """The sender is about to leave: it takes no new work and cannot lead."""


class ClusterState:
    """One node's membership and election, fed in the right order."""

    def __init__(
        self,
        self_id: NodeId,
        boot_id: int,
        store: TermStore,
        now: float,
        timing: Timing,
        *,
        wait_s: float,
    ) -> None:
        """`boot_id` is this process's, and its first incarnation; see `Election` for the rest."""
        self.self_id = self_id
        self.boot_id = boot_id
        self.timing = timing
        self.membership = Membership(self_id, boot_id, timing)
        self.election = Election(self_id, store, now, timing, wait_s=wait_s)
        self.draining: frozenset[NodeId] = frozenset()
        """The nodes that are about to leave, this one among them."""

    def record_heartbeat(self, beat: Heartbeat, now: float) -> tuple[Change, ...]:
        """A heartbeat of another node."""
        node = beat.sender
        news = self.membership.record_heartbeat(node, beat.incarnation, beat.boot_id, now)
        changes = self._with_election(news, now)
        # Its view of this node counts even where the heartbeat does not: this node's record may be
        # of an older process.
        changes += self.membership.record_views(node, beat.views, now)
        if self.membership.is_current(node, beat.incarnation):
            self.draining = self.draining | {node} if beat.draining else self.draining - {node}
            changes += self.election.record_claim(node, beat.claim, self._electable(), now)
        return changes

    def record_refusal(self, node: NodeId, now: float) -> tuple[Change, ...]:
        """A connection to that node's address was refused."""
        return self._with_election(self.membership.record_refusal(node, now), now)

    def remove(self, node: NodeId, now: float) -> tuple[Change, ...]:
        """The node's last heartbeat."""
        return self._with_election(self.membership.remove(node), now)

    def tick(self, now: float) -> tuple[Change, ...]:
        """Due twice a second or more often."""
        changes = self._with_election(self.membership.tick(now), now)
        return changes + self.election.tick(self._electable(), now)

    def resign(self, now: float) -> tuple[Change, ...]:
        """This node is about to leave; its heartbeats carry that from now on."""
        self.draining |= {self.self_id}
        return self.election.resign(self._electable(), now)

    def heartbeat(self, now: float) -> Heartbeat:
        """The heartbeat that this node sends."""
        return Heartbeat(
            sender=self.self_id,
            boot_id=self.boot_id,
            incarnation=self.membership.incarnation,
            claim=self.election.claim(now),
            views=self.membership.views(),
            draining=self.self_id in self.draining,
        )

    def _with_election(
        self, changes: tuple[membership.Change, ...], now: float
    ) -> tuple[Change, ...]:
        """`changes` of the membership, and those that follow in the election."""
        following: list[Change] = []
        for change in changes:
            if isinstance(change, Died | LeftCluster):
                self.draining -= {change.node}
                following += self.election.remove(change.node, self._electable(), now)
        return (*changes, *following)

    def _electable(self) -> frozenset[NodeId]:
        return self.membership.live() - self.draining
