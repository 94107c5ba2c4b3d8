"""Membership and election of one node, as one pure state machine.

What a heartbeat carries goes in, what changed comes out; time comes with each call, in seconds of
a monotonic clock. `node/cluster/cluster.py` runs it over the network, the tests over simulated
time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ...placement.ids import NodeId
from ..machine.timing import Timing
from . import election, membership
from .election import Claimed, Election, Gone, LeaderClaim, Resign, TermStore
from .membership import Died, Gossip, Heard, Left, LeftCluster, Membership, Refused, View

Change = membership.Change | election.Change


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat, as far as membership and election go."""

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
        self.membership = Membership(self_id, boot_id, timing)
        self.election = Election(self_id, store, now, timing, wait_s=wait_s)
        self.draining: frozenset[NodeId] = frozenset()
        """The nodes that are about to leave, this one among them."""

    def heard(self, beat: Heartbeat, now: float) -> tuple[Change, ...]:
        """A heartbeat of another node."""
        news = self.membership.apply(Heard(beat.sender, beat.incarnation, beat.boot_id), now)
        changes = [*news, *self._gone(news, now)]
        # What it says of this node is heard even from a process whose heartbeats are refused:
        # they may be refused because this one's memory of it is an older process's.
        gossip = self.membership.apply(Gossip(beat.sender, beat.views), now)
        if not self.membership.is_current(beat.sender, beat.incarnation):
            return (*changes, *gossip)
        self._note_draining(beat)
        claimed = self.election.apply(Claimed(beat.sender, beat.claim), self._electable(), now)
        return (*changes, *gossip, *claimed)

    def refused(self, node: NodeId, now: float) -> tuple[Change, ...]:
        """A connection to that node's address was refused."""
        news = self.membership.apply(Refused(node), now)
        return (*news, *self._gone(news, now))

    def left(self, node: NodeId, now: float) -> tuple[Change, ...]:
        """The node's last heartbeat."""
        news = self.membership.apply(Left(node), now)
        return (*news, *self._gone(news, now))

    def tick(self, now: float) -> tuple[Change, ...]:
        """Due twice a second or more often."""
        news = self.membership.apply(membership.Tick(), now)
        gone = self._gone(news, now)
        return (*news, *gone, *self.election.apply(election.Tick(), self._electable(), now))

    def resign(self, now: float) -> tuple[Change, ...]:
        """This node is about to leave: from now on its heartbeats say so."""
        self.draining |= {self.self_id}
        return self.election.apply(Resign(), self._electable(), now)

    def beat(self, now: float) -> Heartbeat:
        """The heartbeat that this node sends."""
        return Heartbeat(
            sender=self.self_id,
            boot_id=self.boot_id,
            incarnation=self.membership.incarnation,
            claim=self.election.claim(now),
            views=self.membership.views(),
            draining=self.self_id in self.draining,
        )

    def _gone(self, news: Iterable[membership.Change], now: float) -> list[Change]:
        changes: list[Change] = []
        for change in news:
            if isinstance(change, Died | LeftCluster):
                self.draining -= {change.node}
                changes += self.election.apply(Gone(change.node), self._electable(), now)
        return changes

    def _note_draining(self, beat: Heartbeat) -> None:
        if beat.draining:
            self.draining |= {beat.sender}
        else:
            self.draining -= {beat.sender}

    def _electable(self) -> frozenset[NodeId]:
        return self.membership.live() - self.draining
