"""Elects the head: a lease under a term. A pure state machine: time comes with each call.

The head's heartbeats renew its lease; it ends when the membership gives the head up, when the head
claims that another one leads, resigns, or was itself stopped for too long. Only then do the others
elect: the lowest id among the live ones at once, the next one only where that one neither does nor
dies. The elected node takes the next term and stores it before it uses it, so that no process of a
node leads a term of an earlier one (exo's issue 2197: a clock of elections that was lost with its
process).

A healthy head stays: its followers ignore every other claim, and a node that joins accepts the
lease that it finds. There is no quorum, because two nodes have none: after a partition there may be
two heads, and the two settle it between themselves. One with followers stays against one without,
else the one that has led clearly longer, else the higher (term, id). The one that stays takes a
term above the other's; so for all nodes the higher (term, id) is the head. Two nodes can take the
same term only while heartbeats between them are lost.

A node whose disk does not take a term does not lead under it, and tries again at each tick. It
still follows a head, whose own disk has the term. Terms stop at MAX_TERM, which only a wrong
message can bring about; there the higher id leads.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from ...placement.ids import NodeId, Term
from ..machine.timing import Timing

MAX_TERM = Term(2**62)
"""The highest term that a heartbeat or the disk may hold."""


class TermStore(Protocol):
    """Keeps the highest term that a node knew, over restarts."""

    def load(self) -> Term:
        """0 where none was stored."""
        ...

    def save(self, term: Term) -> None:
        """Returns when the term is safe from a power cut. Raises OSError where it is not."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderClaim:
    """The claim of a heartbeat about the head; only the head itself sets the last two fields."""

    term: Term
    head: NodeId | None
    followers: int = 0
    head_for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadChanged:
    """`before` is the last head that this node knew, None for its first."""

    head: NodeId
    term: Term
    before: NodeId | None


@dataclass(frozen=True, slots=True)
class HeadLost:
    head: NodeId
    term: Term


@dataclass(frozen=True, slots=True)
class TermRaised:
    """The same head under a higher term."""

    term: Term


@dataclass(frozen=True, slots=True)
class TermNotStored:
    """The disk did not take a term; reported once, until it takes one."""

    why: str


@dataclass(frozen=True, slots=True)
class TermStored:
    """The disk takes terms again."""


Change = HeadChanged | HeadLost | TermRaised | TermNotStored | TermStored


@dataclass(slots=True)
class _Lease:
    head: NodeId
    since: float
    trusted_until: float
    """Until then a head that has sent no heartbeat is trusted: its predecessor named it."""


class Election:
    """One node's view of the head. Methods with `live` (the other nodes that may lead) return the
    changes that they cause; `now` is in seconds of a monotonic clock."""

    def __init__(
        self, self_id: NodeId, store: TermStore, now: float, timing: Timing, *, wait_s: float
    ) -> None:
        """`wait_s`: how long a fresh node looks for a head before it leads by itself."""
        self.self_id = self_id
        self._store = store
        self._timing = timing
        self._term = store.load()
        self.not_stored = ""
        """Why the disk does not take a term; "" where it did the last time."""
        self._reported_not_stored = False
        self._lease: _Lease | None = None
        self._headless_since = now + wait_s
        self._patient_until = now
        self._claims: dict[NodeId, LeaderClaim] = {}
        self._ticked_at = now
        self._last_head: NodeId | None = None
        self._resigned = False
        self.elections = 0
        """How often this node took the lead."""
        self.head_changes = 0
        """How often another node became the head, for this node, after its first one."""

    @property
    def term(self) -> Term:
        """The highest that this node received or took: that of its head where it has one."""
        return self._term

    @property
    def head(self) -> NodeId | None:
        """None during an election."""
        return None if self._lease is None else self._lease.head

    def followers(self) -> int:
        """The number of nodes whose claims name this one, while it is the head."""
        if self.head != self.self_id:
            return 0
        return sum(claim.head == self.self_id for claim in self._claims.values())

    def head_for_s(self, now: float) -> float:
        return 0.0 if self._lease is None else now - self._lease.since

    def claim(self, now: float) -> LeaderClaim:
        """The claim in this node's heartbeats."""
        if self.head != self.self_id:
            return LeaderClaim(self._term, self.head)
        return LeaderClaim(self._term, self.self_id, self.followers(), self.head_for_s(now))

    def record_claim(
        self, sender: NodeId, claim: LeaderClaim, live: Collection[NodeId], now: float
    ) -> tuple[Change, ...]:
        """The claim of a heartbeat of `sender`."""
        self._claims[sender] = claim
        changes: list[Change] = []
        if self.head == self.self_id:
            changes = self._as_head(sender, claim, now)
        elif self.head == sender:
            changes = self._from_head(claim, now)
        return self._find_head(changes, live, now)

    def remove(self, node: NodeId, live: Collection[NodeId], now: float) -> tuple[Change, ...]:
        """The node died, left, or its process was replaced by another one."""
        _ = self._claims.pop(node, None)
        return self._find_head(self._lose(now) if self.head == node else [], live, now)

    def resign(self, live: Collection[NodeId], now: float) -> tuple[Change, ...]:
        """This node is about to leave: it gives up its lease and takes none any more."""
        self._resigned = True
        return self._find_head(self._lose(now) if self.head == self.self_id else [], live, now)

    def tick(self, live: Collection[NodeId], now: float) -> tuple[Change, ...]:
        """Due twice a second or more often."""
        if self.not_stored:
            _ = self._stores(self._term)
        return self._find_head(self._expire(live, now), live, now)

    def _find_head(
        self, changes: list[Change], live: Collection[NodeId], now: float
    ) -> tuple[Change, ...]:
        """`changes`, and those that follow where there is no head."""
        if self._lease is None:
            changes += self._adopt_known(live, now) or self._elect(live, now)
        return (*changes, *self._disk_changes())

    def _as_head(self, sender: NodeId, claim: LeaderClaim, now: float) -> list[Change]:
        if claim.head == sender and claim.term > 0:
            return self._contest(sender, claim, now)
        if claim.head in (None, self.self_id) and claim.term > self._term:
            return self._raise_above(claim.term)  # it follows no head below what it knows
        return []

    def _contest(self, other: NodeId, claim: LeaderClaim, now: float) -> list[Change]:
        if (claim.term, other) <= (self._term, self.self_id):
            return []  # where it is the one to stay, it is about to raise its term
        if self._outranks(other, claim, now) and (raised := self._raise_above(claim.term)):
            return raised
        return self._adopt(claim.term, other, now)

    def _outranks(self, other: NodeId, claim: LeaderClaim, now: float) -> bool:
        followed, other_followed = self.followers() > 0, claim.followers > 0
        if followed != other_followed:
            return followed
        longer_by = self.head_for_s(now) - claim.head_for_s
        if abs(longer_by) > self._timing.clearly_s:
            return longer_by > 0
        return (self._term, self.self_id) > (claim.term, other)

    def _raise_above(self, term: Term) -> list[Change]:
        """Nothing where no higher term can be had: then this node cannot stay the head."""
        if term >= MAX_TERM or not self._leads_under(Term(term + 1)):
            return []
        return [TermRaised(self._term)]

    def _from_head(self, claim: LeaderClaim, now: float) -> list[Change]:
        assert self._lease is not None
        head = self._lease.head
        if claim.term < self._term:
            return []  # an old message
        if claim.head == head:
            if claim.term == self._term:
                return []
            self._learn(claim.term)
            return [TermRaised(claim.term)]
        if claim.head is None or claim.head == self.self_id:
            return self._lose(now)
        return self._adopt(claim.term, claim.head, now)

    def _expire(self, live: Collection[NodeId], now: float) -> list[Change]:
        stopped, self._ticked_at = now - self._ticked_at, now
        if stopped > self._timing.lease_s and live:
            self._claims.clear()
            self._patient_until = max(self._patient_until, now + self._timing.waking_s)
            return self._lose(now) if self.head == self.self_id else []
        lease = self._lease
        if lease is None or lease.head == self.self_id or lease.head in live:
            return []
        return [] if now < lease.trusted_until else self._lose(now)

    def _lose(self, now: float) -> list[Change]:
        assert self._lease is not None
        head, self._lease = self._lease.head, None
        self._headless_since = now
        return [HeadLost(head, self._term)]

    def _adopt_known(self, live: Collection[NodeId], now: float) -> list[Change]:
        """Follows the highest of the heads that live nodes name, if its term is high enough."""
        named = [
            (claim.term, claim.head, sender)
            for sender, claim in self._claims.items()
            if sender in live and claim.head in live and self._leads(claim.head)
        ]
        if not named:
            return []
        term, head, _ = max(named)
        if term >= self._term and head is not None:
            return self._adopt(term, head, now)
        if any(sender == head for _, head, sender in named):
            patient_until = self._headless_since + self._timing.patience_s
            self._patient_until = max(self._patient_until, patient_until)
        return []

    def _leads(self, node: NodeId | None) -> bool:
        """Whether no claim of the node itself contradicts that it is the head."""
        own = None if node is None else self._claims.get(node)
        return own is None or own.head == node

    def _elect(self, live: Collection[NodeId], now: float) -> list[Change]:
        if self._resigned:
            return []
        rank = sum(node < self.self_id for node in live)
        turn = self._headless_since + rank * self._timing.stagger_s
        if now < max(turn, self._patient_until):
            return []
        if not self._leads_under(Term(min(self._term + 1, MAX_TERM))):
            return []
        self.elections += 1
        return self._follow(self.self_id, now)

    def _adopt(self, term: Term, head: NodeId, now: float) -> list[Change]:
        self._learn(term)
        return self._follow(head, now)

    def _follow(self, head: NodeId, now: float) -> list[Change]:
        before, self._last_head = self._last_head, head
        self._lease = _Lease(head, now, now + self._timing.patience_s)
        self.head_changes += before not in (None, head)
        return [HeadChanged(head, self._term, before)]

    def _leads_under(self, term: Term) -> bool:
        """Stores a term before it is sent; False where the disk did not take it."""
        assert term >= self._term
        if (term != self._term or self.not_stored) and not self._stores(term):
            return False
        self._term = term
        return True

    def _learn(self, term: Term) -> None:
        """Another node's term, which that node stored before it sent it."""
        assert term >= self._term
        if term != self._term:
            _ = self._stores(term)
            self._term = term

    def _stores(self, term: Term) -> bool:
        try:
            self._store.save(term)
        except OSError as fault:
            self.not_stored = fault.strerror or type(fault).__name__
            return False
        self.not_stored = ""
        return True

    def _disk_changes(self) -> list[Change]:
        if self._reported_not_stored == bool(self.not_stored):
            return []
        self._reported_not_stored = bool(self.not_stored)
        return [TermNotStored(self.not_stored)] if self.not_stored else [TermStored()]
