"""What a node knows of each of the others: where it listens, and what it said last."""

from dataclasses import dataclass, field

from ...proto import peer_pb2 as pb
from .reach import Reach

EXCHANGE_WEIGHT = 0.25
"""Of the last exchange in the mean: the first one's handshake fades within seconds."""


@dataclass(slots=True)
class Member:
    """Another node and its last heartbeat."""

    address: str
    beat: pb.Heartbeat
    missing_since: dict[tuple[str, int], float] = field(
        default_factory=dict[tuple[str, int], float]
    )
    progress: dict[tuple[str, int], tuple[int, float]] = field(
        default_factory=dict[tuple[str, int], tuple[int, float]]
    )
    """Of each stage: the steps its runner has finished, and when that number last changed."""
    unloaded: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(placement, stage) that it answered to have unloaded, until its heartbeats agree."""
    reach: Reach = field(default_factory=Reach)
    exchange_s: float = 0.0
    """How long a heartbeat there and back takes: a mean in which the last ones count most."""

    def took(self, seconds: float) -> None:
        before = self.exchange_s or seconds
        self.exchange_s = before + EXCHANGE_WEIGHT * (seconds - before)

    def hear(self, address: str, beat: pb.Heartbeat, now: float) -> None:
        """Its next heartbeat, and where it listens."""
        self.address, self.beat = address, beat
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
        """What it holds, as far as this node knows."""
        states = self.beat.placements
        return [s for s in states if (s.placement, s.stage) not in self.unloaded]
