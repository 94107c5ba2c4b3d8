"""Chooses how many tokens a batch drafts per round, from the measured seconds of its rounds.

Pure. A batch has one K, since its requests share a forward; requests that draft fewer are padded.
The best K, which may be 0, has the most expected tokens of all requests per second. After a rest
the head must read rows before it drafts, which adds to the cost of drafting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .costs import ENOUGH, RecentSeconds, bounded
from .depth import HYSTERESIS, expected_tokens, speed_list

LOOK_EVERY: Final = 64
"""Minimum of rounds between trials of a neighbouring K: costs change as contexts grow."""
LOOK_SHARE: Final = 0.02
"""Expected loss of a trial, at most, as a share of the time since the last one."""
WAKE_ROUNDS: Final = 64
"""Rounds of drafting over which the head's reading before them is amortised."""


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """The drafts that one request of a batch asks for."""

    limit: int
    """Drafts of the next round, at most."""
    acceptance: Sequence[float] | None
    """Acceptance probabilities for `expected_tokens`, or None for `limit` drafts at any cost."""


def size_bucket(size: int) -> int:
    """The bucket of a batch size: one for each of 1 to 4, then 5 to 8, 9 to 16 and so on."""
    return size if size <= 4 else 2 + (size - 1).bit_length()


@dataclass(slots=True)
class _LookInterval:
    """The time since the last trial of another K, for one bucket of batch sizes."""

    rounds: int = 0
    seconds: float = 0.0
    looks: int = 0

    @property
    def may_lose(self) -> float:
        """Seconds that a trial may lose in expectation by now."""
        return LOOK_SHARE * self.seconds


class BatchDepth:
    """Records the seconds of rounds by batch size and K, and chooses the next K."""

    def __init__(self) -> None:
        self._cells = RecentSeconds[tuple[int, int]]()
        """Seconds of a request's share of rounds, by (bucket of sizes, K)."""
        self._k: dict[int, int] = {}
        self._intervals: dict[int, _LookInterval] = {}
        self._row = 0.0
        """Seconds that the head takes to read a waiting row."""
        self._last: tuple[Sequence[DraftDemand], int] = ((), 0)
        """The last choice."""

    def reason(self) -> str:
        """Why the last choice was made."""
        demands, k = self._last
        bucket = size_bucket(len(demands))
        chosen = f"K = {k} for {len(demands)} requests together"
        measured = list[int]()
        while self._is_measured(bucket, len(measured)):
            measured.append(len(measured))
        if len(measured) < 2:
            return f"{chosen}, until enough is measured to choose by speed"
        rates = [self._rate(bucket, depth, demands) for depth in measured]
        return f"{chosen}: {speed_list([rate / rates[0] for rate in rates])}"

    def choose(self, demands: Sequence[DraftDemand], unread: int = 0, running: int = 0) -> int:
        """The K of the next round. `unread`: rows that the head must read before it drafts.
        `running`: requests in progress, of which some may join soon.
        """
        k = self._choose(demands, unread, running)
        self._last = demands, k
        return k

    def _choose(self, demands: Sequence[DraftDemand], unread: int, running: int) -> int:
        """Climbs hills: a K is tried only next to the best so far, since a round of many drafts can
        take several times as long as a plain one. A new size begins with the K of the nearest one.
        At intervals a neighbour's measurements are dropped, so that it is measured again.
        """
        floor = max((w.limit for w in demands if w.acceptance is None), default=0)
        ceiling = max((w.limit for w in demands), default=0)
        bucket = size_bucket(len(demands))
        current = min(max(self._begin(bucket), floor), ceiling)
        if unread and running > len(demands) and self.is_resting(running):
            return floor
        if floor == ceiling or not self._is_measured(bucket, current):
            return current
        neighbours = [k for k in (current + 1, current - 1) if floor <= k <= ceiling]
        for k in neighbours:
            if not self._is_measured(bucket, k):
                return k
        wake = self._row * unread
        spread = {k: wake / WAKE_ROUNDS if k else 0.0 for k in (current, *neighbours)}
        rates = {k: self._rate(bucket, k, demands, extra_s) for k, extra_s in spread.items()}
        best = max(neighbours, key=rates.__getitem__)
        if rates[best] > HYSTERESIS * rates[current]:
            self._k[bucket] = best
            return best
        self._k[bucket] = current
        interval = self._intervals[bucket]
        k = neighbours[interval.looks % len(neighbours)]
        if (
            interval.rounds < LOOK_EVERY
            or self._loss(bucket, current, k, demands, wake) > interval.may_lose
        ):
            return current
        self._intervals[bucket] = _LookInterval(looks=interval.looks + 1)
        del self._cells[bucket, k]
        return k

    def _loss(
        self, bucket: int, current: int, k: int, demands: Sequence[DraftDemand], wake: float
    ) -> float:
        """Seconds that a trial of `k` is expected to lose."""
        slower = 1 - self._rate(bucket, k, demands) / self._rate(bucket, current, demands)
        rounds = ENOUGH * self._seconds(bucket, k) * len(demands)
        return rounds * slower + (wake if k else 0.0)

    def is_resting(self, size: int) -> bool:
        """Whether drafts did not pay off when a batch of about `size` requests chose last."""
        return bool(self._k) and self._begin(size_bucket(size)) == 0

    def record_wake(self, rows: int, seconds: float) -> None:
        """Records that the head took `seconds` to read `rows` waiting rows."""
        self._row = seconds / rows

    def learn(self, size: int, k: int, seconds: float) -> None:
        """Records that a round of `size` requests and `k` drafts took `seconds`."""
        bucket = size_bucket(size)
        interval = self._intervals.setdefault(bucket, _LookInterval())
        interval.rounds += 1
        interval.seconds += seconds
        self._cells.add((bucket, k), seconds / size)

    def seconds(self, size: int, k: int) -> float | None:
        """Seconds of a round of `size` requests and `k` drafts; None if too little was measured."""
        share = self._cells.cost((size_bucket(size), k))
        return None if share is None else share * size

    def _begin(self, bucket: int) -> int:
        if not self._k:
            return 0
        return self._k[min(self._k, key=lambda other: (abs(other - bucket), other))]

    def _is_measured(self, bucket: int, k: int) -> bool:
        return self._cells.cost((bucket, k)) is not None

    def _seconds(self, bucket: int, k: int) -> float:
        """Median seconds of a measured round, divided by its requests."""
        share = self._cells.cost((bucket, k))
        assert share is not None
        return share

    def _rate(
        self, bucket: int, k: int, demands: Sequence[DraftDemand], more: float = 0.0
    ) -> float:
        """Expected tokens per second; `more`: seconds of a round beyond the measured ones."""
        tokens = sum(
            expected_tokens(w.acceptance or (), min(k, w.limit)) for w in demands if w.acceptance
        )
        rest = sum(1 for w in demands if not w.acceptance)
        wider = [each for b, each in self._cells if b == bucket and each > k]
        depths = [k, *(each for each in wider if self._is_measured(bucket, each))]
        seconds = bounded([self._seconds(bucket, each) for each in sorted(depths)])[0]
        return (tokens + rest) / (seconds * len(demands) + more)
