"""What a node knows of each of the others: where it listens, and what it said last."""

from dataclasses import dataclass, field

from ...proto import peer_pb2 as pb

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
    exchange_s: float = 0.0
    """How long a heartbeat there and back takes: a mean in which the last ones count most."""

    def took(self, seconds: float) -> None:
        before = self.exchange_s or seconds
        self.exchange_s = before + EXCHANGE_WEIGHT * (seconds - before)

    def hear(self, address: str, beat: pb.Heartbeat, now: float) -> None:
        """Its next heartbeat, and where it listens."""
        self.address, self.beat = address, beat
        self.progress = {
            key: before
            if (before := self.progress.get(key)) is not None and before[0] == state.progress
            else (state.progress, now)
            for state in beat.placements
            for key in [(state.placement, state.stage)]
        }

    def names(self, placement: str, stage: int) -> bool:
        """Whether its last heartbeat named that stage."""
        return any((s.placement, s.stage) == (placement, stage) for s in self.beat.placements)
