"""How many tokens a batch drafts a round: as many as its measured rounds say pays.

Pure. A batch has one K, as its requests share a forward; those that want fewer are padded. The best
is that with the most expected tokens of all requests for its seconds, 0 among them.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .depth import HYSTERESIS, expected_tokens

RECENT: Final = 15
ENOUGH: Final = 3
LOOK_EVERY: Final = 64
"""Rounds between looks at a neighbouring K: costs change as contexts grow."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request of a batch wants."""

    limit: int
    """The most that it may draft now; 0: nothing."""
    acceptance: Sequence[float] | None
    """By position, as `expected_tokens` has them; None: `limit` drafts, whatever they cost."""


def size_bucket(size: int) -> int:
    """Batches of 1 to 4 have buckets of their own, then 5 to 8, 9 to 16 and so on."""
    return size if size <= 4 else 2 + (size - 1).bit_length()


class BatchDepth:
    """Learns what rounds cost by size and K, and chooses."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[float]] = {}
        self._k: dict[int, int] = {}
        self._rounds = 0

    def choose(self, wishes: Sequence[Wish]) -> int:
        """The K of the next round.

        It climbs: a K is tried where its neighbour is the best so far, as a round of many drafts
        can take several times as long as a plain one. A size that is new begins where the nearest
        one is.
        """
        floor = max((w.limit for w in wishes if w.acceptance is None), default=0)
        ceiling = max((w.limit for w in wishes), default=0)
        bucket = size_bucket(len(wishes))
        now = min(max(self._begin(bucket), floor), ceiling)
        if floor == ceiling or not self._known(bucket, now):
            return now
        near = [k for k in (now + 1, now - 1) if floor <= k <= ceiling]
        for k in near:
            if not self._known(bucket, k):
                return k
        best = max(near, key=lambda k: self._rate(bucket, k, wishes))
        if self._rate(bucket, best, wishes) > HYSTERESIS * self._rate(bucket, now, wishes):
            now = best
        self._k[bucket] = now
        if self._rounds % LOOK_EVERY < ENOUGH:
            return near[self._rounds // LOOK_EVERY % len(near)]
        return now

    def _begin(self, bucket: int) -> int:
        if not self._k:
            return 0
        return self._k[min(self._k, key=lambda known: (abs(known - bucket), known))]

    def learn(self, size: int, k: int, seconds: float) -> None:
        """One round of a batch of `size` requests took `seconds`."""
        self._rounds += 1
        cell = (size_bucket(size), k)
        self._cells.setdefault(cell, deque(maxlen=RECENT)).append(seconds / size)

    def _known(self, bucket: int, k: int) -> bool:
        return len(self._cells.get((bucket, k), ())) >= ENOUGH

    def _rate(self, bucket: int, k: int, wishes: Sequence[Wish]) -> float:
        tokens = sum(
            expected_tokens(w.acceptance or (), min(k, w.limit)) for w in wishes if w.acceptance
        )
        rest = sum(1 for w in wishes if not w.acceptance)
        return (tokens + rest) / (statistics.median(self._cells[bucket, k]) * len(wishes))
