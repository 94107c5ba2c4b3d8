"""How this node and another one reach each other, and how far apart their clocks are; pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """Another node's clock against this one's."""

    ahead_s: float
    within_s: float
    """How far off `ahead_s` may be."""


def clock_difference(sent_ms: int, took_s: float, now_s: float) -> ClockDifference:
    """Of an answer that came now, `took_s` after its question: it was sent in between.

    `now_s` is Unix time by this node's clock, `sent_ms` by the other's.
    """
    return ClockDifference(sent_ms / 1000 - (now_s - took_s / 2), took_s / 2)


@dataclass(slots=True)
class Reach:
    """When heartbeats last passed, in seconds of a monotonic clock; None: never."""

    answered: float | None = None
    """This node's own, which the other one answered."""
    heard: float | None = None
    """The other one's, which it sent to this node's port."""
    clock: ClockDifference | None = None

    def describe(self, now: float) -> dict[str, float | None]:
        """JSON-ready."""
        clock = self.clock
        return {
            "answered_ago_s": None if self.answered is None else round(now - self.answered, 1),
            "heard_ago_s": None if self.heard is None else round(now - self.heard, 1),
            "clock_ahead_s": None if clock is None else round(clock.ahead_s, 3),
            "clock_within_s": None if clock is None else round(clock.within_s, 3),
        }
