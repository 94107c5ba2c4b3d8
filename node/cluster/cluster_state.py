"""Membership and election of one node, as one pure state machine.

Heartbeats go in, changes come out; time comes with each call, in seconds of a monotonic clock.
`node/cluster/cluster.py` runs it over the network, the tests over simulated time.
"""

from collections.abc import Iterator, Mapping

from ...placement.ids import NodeId, Term
from ...proto import peer_pb2 as pb
from ..machine.timing import Timing
from . import election, membership
from .election import Election, LeaderClaim, TermStore
from .membership import Died, LeftCluster, Membership, Status, View

Change = membership.Change | election.Change

_TO_WIRE: Mapping[Status, pb.ViewStatus.ValueType] = {
    "alive": pb.VIEW_STATUS_ALIVE,
    "suspect": pb.VIEW_STATUS_SUSPECT,
    "dead": pb.VIEW_STATUS_DEAD,
}
_FROM_WIRE: Mapping[int, Status] = {number: status for status, number in _TO_WIRE.items()}


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

    def record_heartbeat(self, beat: pb.Heartbeat, now: float) -> tuple[Change, ...]:
        """A heartbeat of another node."""
        node = NodeId(beat.sender.id)
        news = self.membership.record_heartbeat(node, beat.incarnation, beat.boot_id, now)
        changes = self._with_election(news, now)
        # Its view of this node counts even where the heartbeat does not: this node's record may be
        # of an older process.
        changes += self.membership.record_views(node, _views(beat), now)
        if self.membership.is_current(node, beat.incarnation):
            self.draining = self.draining | {node} if beat.draining else self.draining - {node}
            claim = LeaderClaim(
                Term(beat.term), NodeId(beat.head) or None, beat.followers, beat.head_for_s
            )
            changes += self.election.record_claim(node, claim, self._electable(), now)
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

    def heartbeat(self, now: float) -> pb.Heartbeat:
        """The part of this node's heartbeat that membership and election decide."""
        claim = self.election.claim(now)
        return pb.Heartbeat(
            sender=pb.NodeFacts(id=self.self_id),
            boot_id=self.boot_id,
            incarnation=self.membership.incarnation,
            term=claim.term,
            head=claim.head or "",
            followers=claim.followers,
            head_for_s=claim.head_for_s,
            views=[
                pb.View(node=view.node, incarnation=view.incarnation, status=_TO_WIRE[view.status])
                for view in self.membership.views()
            ],
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


def _views(beat: pb.Heartbeat) -> Iterator[View]:
    """The sender's views; those of a status that is unknown here are left out."""
    for view in beat.views:
        if view.status in _FROM_WIRE:
            yield View(NodeId(view.node), view.incarnation, _FROM_WIRE[view.status])
