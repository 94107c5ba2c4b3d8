"""How many tokens a batch drafts a round: as many as its measured rounds say pays.

Pure. A batch has one K, as its requests share a forward; those that want fewer are padded. The best
is that with the most expected tokens of all requests for its seconds, 0 among them. A head that
rests has rows to read before it drafts: what that takes is a part of what drafting costs.
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
"""Rounds between looks at a neighbouring K, at the least: costs change as contexts grow."""
LOOK_SHARE: Final = 0.02
"""Of the time since the last look, what one may be expected to lose."""
WAKE_ROUNDS: Final = 64
"""Rounds of drafting that what a head has to read before them is spread over."""


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


@dataclass(slots=True)
class _Spell:
    """The time since the last look, of batches of about one size."""

    rounds: int = 0
    seconds: float = 0.0
    looks: int = 0

    @property
    def may_lose(self) -> float:
        """Seconds that a look may be expected to lose by now."""
        return LOOK_SHARE * self.seconds


class BatchDepth:
    """Learns what rounds cost by size and K, and chooses."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[float]] = {}
        self._k: dict[int, int] = {}
        self._spells: dict[int, _Spell] = {}
        self._row = 0.0
        """Seconds that the head takes for a row that waited."""

    def choose(self, wishes: Sequence[Wish], unread: int = 0, running: int = 0) -> int:
        """The K of the next round; `unread`: rows that the head must read before it drafts;
        `running`: answers that are in progress, of which some may join soon.

        It climbs: a K is tried where its neighbour is the best so far, as a round of many drafts
        can take several times as long as a plain one. A size that is new begins where the nearest
        one is. Now and then what a neighbour costs is forgotten, and so measured anew.
        """
        floor = max((w.limit for w in wishes if w.acceptance is None), default=0)
        ceiling = max((w.limit for w in wishes), default=0)
        bucket = size_bucket(len(wishes))
        now = min(max(self._begin(bucket), floor), ceiling)
        if unread and running > len(wishes) and self.rests(running):
            return floor
        if floor == ceiling or not self._known(bucket, now):
            return now
        near = [k for k in (now + 1, now - 1) if floor <= k <= ceiling]
        for k in near:
            if not self._known(bucket, k):
                return k
        wake = self._row * unread
        spread = {k: wake / WAKE_ROUNDS if k else 0.0 for k in (now, *near)}
        rates = {k: self._rate(bucket, k, wishes, more) for k, more in spread.items()}
        best = max(near, key=rates.__getitem__)
        if rates[best] > HYSTERESIS * rates[now]:
            self._k[bucket] = best
            return best
        self._k[bucket] = now
        spell = self._spells[bucket]
        k = near[spell.looks % len(near)]
        if spell.rounds < LOOK_EVERY or self._loss(bucket, now, k, wishes, wake) > spell.may_lose:
            return now
        self._spells[bucket] = _Spell(looks=spell.looks + 1)
        del self._cells[bucket, k]
        return k

    def _loss(self, bucket: int, now: int, k: int, wishes: Sequence[Wish], wake: float) -> float:
        """Seconds that a look at `k` is expected to lose."""
        slower = 1 - self._rate(bucket, k, wishes) / self._rate(bucket, now, wishes)
        rounds = ENOUGH * self._seconds(bucket, k) * len(wishes)
        return rounds * slower + (wake if k else 0.0)

    def rests(self, size: int) -> bool:
        """Whether drafts did not pay when a batch of about that size chose last."""
        return bool(self._k) and self._begin(size_bucket(size)) == 0

    def woke(self, rows: int, seconds: float) -> None:
        """The head read `rows` rows that had waited."""
        self._row = seconds / rows

    def learn(self, size: int, k: int, seconds: float) -> None:
        """One round of a batch of `size` requests took `seconds`."""
        bucket = size_bucket(size)
        spell = self._spells.setdefault(bucket, _Spell())
        spell.rounds += 1
        spell.seconds += seconds
        self._cells.setdefault((bucket, k), deque(maxlen=RECENT)).append(seconds / size)

    def _begin(self, bucket: int) -> int:
        if not self._k:
            return 0
        return self._k[min(self._k, key=lambda known: (abs(known - bucket), known))]

    def _known(self, bucket: int, k: int) -> bool:
        return len(self._cells.get((bucket, k), ())) >= ENOUGH

    def _seconds(self, bucket: int, k: int) -> float:
        """Of a round, for each request."""
        return statistics.median(self._cells[bucket, k])

    def _rate(self, bucket: int, k: int, wishes: Sequence[Wish], more: float = 0.0) -> float:
        """Tokens a second; `more`: seconds of a round beside those that were measured."""
        tokens = sum(
            expected_tokens(w.acceptance or (), min(k, w.limit)) for w in wishes if w.acceptance
        )
        rest = sum(1 for w in wishes if not w.acceptance)
        return (tokens + rest) / (self._seconds(bucket, k) * len(wishes) + more)
