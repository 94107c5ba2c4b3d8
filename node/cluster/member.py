"""What a node knows of each of the others: where it listens, and what it said last."""

from dataclasses import dataclass, field

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb

EXCHANGE_WEIGHT = 0.25
"""Of the last exchange in the mean: the first one's handshake fades within seconds."""


@dataclass(slots=True)
class Dial:
    """An address that is worth dialling, and how that went."""

    address: str
    node: NodeId | None
    backoff_s: float
    complaint: str = ""
    failures: int = 0
    """Heartbeats in a row that were not answered."""


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
