"""The other nodes, each by its last heartbeat; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb

EXCHANGE_WEIGHT = 0.25
"""Share of the last exchange in the mean: the first one's handshake fades within seconds."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One live node as its heartbeats describe it."""

    facts: pb.NodeFacts
    stages: Sequence[pb.StageState] = ()

    @property
    def id(self) -> NodeId:
        return NodeId(self.facts.id)


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One node that is not dead, with what its head has to know."""

    member: MemberFacts
    draining: bool
    head: str
    """The node that it follows."""
    heard_at: float
    """When its last heartbeat came, by the monotonic clock."""
    alive_since: float = float("-inf")
    """Since when it is heard without a gap."""


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """Another node's clock against this one's."""

    ahead_s: float
    within_s: float
    """How far off `ahead_s` may be."""


def clock_difference(sent_ms: int, took_s: float, now_s: float) -> ClockDifference:
    """The difference by an answer that arrived now, `took_s` after its question was sent.

    `now_s` is Unix time by this node's clock, `sent_ms` by the other's. The answer is taken to
    have been sent in the middle; so the result is off by half of `took_s` at most.
    """
    return ClockDifference(sent_ms / 1000 - (now_s - took_s / 2), took_s / 2)


@dataclass(slots=True)
class Reach:
    """When heartbeats last passed, in seconds of a monotonic clock; None: never."""

    answered_at: float | None = None
    """The last heartbeat of this node that the other one answered."""
    received_at: float | None = None
    """The last heartbeat that the other node sent to this node's port."""
    clock: ClockDifference | None = None

    def describe(self, now: float) -> dict[str, float | None]:
        """The seconds since then, JSON-ready."""
        clock = self.clock
        return {
            "answered_ago_s": None
            if self.answered_at is None
            else round(now - self.answered_at, 1),
            "heard_ago_s": None if self.received_at is None else round(now - self.received_at, 1),
            "clock_ahead_s": None if clock is None else round(clock.ahead_s, 3),
            "clock_within_s": None if clock is None else round(clock.within_s, 3),
        }


@dataclass(slots=True)
class Member:
    """Another node, its address and its last heartbeat."""

    address: str
    beat: pb.Heartbeat
    heard_at: float = float("-inf")
    """When its last heartbeat came, by the monotonic clock."""
    alive_since: float = float("-inf")
    """Since when its heartbeats come without a gap."""
    progress: dict[tuple[str, int], tuple[int, float]] = field(
        default_factory=dict[tuple[str, int], tuple[int, float]]
    )
    """Steps that the runner of each (placement, stage) finished, and when that changed."""
    unloaded: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(placement, stage) that the node reported as unloaded, until its heartbeats agree."""
    reach: Reach = field(default_factory=Reach)
    exchange_s: float = 0.0
    """Seconds of a heartbeat there and back: a mean in which the last ones count most."""

    def record_exchange(self, seconds: float) -> None:
        before = self.exchange_s or seconds
        self.exchange_s = before + EXCHANGE_WEIGHT * (seconds - before)

    def record_heartbeat(self, address: str, beat: pb.Heartbeat, now: float) -> None:
        """Replaces the last heartbeat and the address."""
        self.address, self.beat, self.heard_at = address, beat, now
        self.unloaded &= {(state.placement, state.stage) for state in beat.placements}
        self.progress = {
            key: before
            if (before := self.progress.get(key)) is not None and before[0] == state.progress
            else (state.progress, now)
            for state in beat.placements
            for key in [(state.placement, state.stage)]
        }

    @property
    def stages(self) -> list[pb.StageState]:
        """The stages that the node holds, as far as this one knows."""
        states = self.beat.placements
        return [s for s in states if (s.placement, s.stage) not in self.unloaded]
