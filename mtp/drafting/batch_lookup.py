"""Decides the rounds of a batch: the drafts of the head, and which requests copy theirs. Pure.

A batch has one width, since its requests share a forward. A copy takes the place of a request's own
drafts at the same width where more of its tokens are expected to stand; that costs nothing. A wider
round must pay for everybody's padding: it needs more tokens of all requests for its seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .batch_depth import BatchDepth, DraftDemand, size_bucket
from .costs import RecentSeconds
from .depth import expected_tokens
from .lookup_length import MARGIN

MAX_ROUND_ROWS: Final = 64
"""Rows of a round that copies, of all requests: beyond, products use other algorithms."""
MAX_LENGTH: Final = 15
"""Copied tokens of a round that is shared: a kernel that keeps states has one after each of 16
rows, from which requests may keep different numbers of rows."""
FORGET_AFTER: Final = 512
"""Rounds in which the costs of the load would have chosen a width that was measured as too dear,
until it is measured again: ENOUGH of them, of which each may cost several plain ones."""


class Offer(NamedTuple):
    """The drafts that one request of a batch may have."""

    demand: DraftDemand
    """Its own head's."""
    reached: Sequence[float] = ()
    """Chances that the first 1, 2, … tokens of its copy stand, as many as it may copy."""


class CopyPlan(NamedTuple):
    """The next round of a batch."""

    width: int
    """Drafts for which each request has a row."""
    head: int
    """Drafts of the head for requests that do not copy, or 0 if it does not run."""
    is_copied: Sequence[bool]
    """Whether a request copies its drafts, by request."""


def sizes_of(length: int, most: int) -> tuple[int, ...]:
    """The requests that are measured together with copies of `length` tokens: few, and as many as
    may share a round, `most` at most. None if such copies are never shared."""
    if length > MAX_LENGTH:
        return ()
    largest = min(most, MAX_ROUND_ROWS // (length + 1))
    return tuple(sorted({min(3, largest), largest})) if largest > 1 else ()


class BatchPolicy:
    """Chooses the rounds of all batches of a model, from the seconds that they took."""

    def __init__(self) -> None:
        self.depth = BatchDepth()
        self._lengths: Sequence[int] = ()
        self._ratios: Mapping[tuple[int, int], float] | None = {}
        """Seconds of a round by (requests, width), relative to a plain one, or None if all cost
        the same."""
        self._exact_head = 0
        self._cells = RecentSeconds[tuple[int, int, int]]()
        """Seconds of a request's share of rounds, by (bucket of sizes, width, head)."""
        self._passed: dict[tuple[int, int, int], int] = {}

    def allow(
        self, lengths: Sequence[int], ratios: Mapping[tuple[int, int], float] | None, head: int = 0
    ) -> None:
        """Allows copies of `lengths`, and in place of up to `head` drafts of the head. All of them
        are exact in batches. `ratios`: the seconds of rounds by (requests, length), relative to
        plain ones, or None if all cost the same."""
        self._lengths = sorted(length for length in lengths if length <= MAX_LENGTH)
        self._ratios = ratios
        self._exact_head = head

    @property
    def copies(self) -> bool:
        """Whether any request of a batch may copy."""
        return bool(self._lengths)

    def choose(self, offers: Sequence[Offer], head: int) -> CopyPlan:
        """The round in which the head would draft `head` tokens if no request copied."""
        size = len(offers)
        plain = CopyPlan(head, head, [False] * size)
        if not self._lengths or not any(offer.reached for offer in offers):
            return plain
        best, tokens = plain, _tokens(offers, plain)
        if 0 < head <= self._exact_head:
            best, tokens = _filled(offers, head, head)
        seconds = self._seconds(size, head, head)
        if seconds is None:
            return best
        best_rate = MARGIN * tokens / seconds
        depths = {head} if any(offer.demand.acceptance is None for offer in offers) else {head, 0}
        for width in self._lengths:
            if size * (width + 1) > MAX_ROUND_ROWS:
                break
            for k in sorted(k for k in depths if k < width):
                choice, tokens = _filled(offers, width, k)
                seconds = self._seconds(size, width, choice.head)
                if seconds is not None and tokens / seconds > best_rate:
                    best, best_rate = choice, tokens / seconds
                elif any(choice.is_copied):
                    self._pass_over(size, choice, tokens, best_rate)
        return best

    def learn(self, size: int, choice: CopyPlan, drafted: int, seconds: float) -> None:
        """Records that a round of `size` requests took `seconds`. `drafted`: the most drafts of a
        request."""
        if choice.width == choice.head:
            self.depth.learn(size, drafted, seconds)
            return
        cell = size_bucket(size), choice.width, choice.head
        self._cells.add(cell, seconds / size)

    def _seconds(self, size: int, width: int, head: int) -> float | None:
        """Seconds of a round; None if too little was measured."""
        if self._ratios is None:
            return 1.0
        if width == head:
            return self.depth.seconds(size, head)
        share = self._cells.cost((size_bucket(size), width, head))
        return self._estimate(size, width, head) if share is None else share * size

    def _estimate(self, size: int, width: int, head: int) -> float | None:
        """The same by the costs that were measured as the model was loaded."""
        base, near = self.depth.seconds(size, head), size_bucket(size)
        sizes = [n for n, length in self._ratios or () if length == width]
        if base is None or not sizes:
            return None
        nearest = min(sizes, key=lambda n: (abs(size_bucket(n) - near), -n))
        return base * (self._ratios or {})[nearest, width]

    def _pass_over(self, size: int, choice: CopyPlan, tokens: float, rate: float) -> None:
        """Forgets a measured cost that keeps a width from being used, now and then."""
        cell = size_bucket(size), choice.width, choice.head
        usual = self._estimate(size, choice.width, choice.head)
        if cell not in self._cells or usual is None or tokens / usual <= rate:
            return
        self._passed[cell] = self._passed.get(cell, 0) + 1
        if self._passed[cell] >= FORGET_AFTER:
            del self._passed[cell], self._cells[cell]


def _filled(offers: Sequence[Offer], width: int, head: int) -> tuple[CopyPlan, float]:
    """The round of that width in which each request has its better drafts, and its expected
    tokens."""
    is_copied = [
        bool(offer.reached) and _copied(offer, width) > _drafted(offer, head) for offer in offers
    ]
    choice = CopyPlan(width, 0 if all(is_copied) else head, is_copied)
    return choice, _tokens(offers, choice)


def _tokens(offers: Sequence[Offer], choice: CopyPlan) -> float:
    return sum(
        _copied(offer, choice.width) if is_copied else _drafted(offer, choice.head)
        for offer, is_copied in zip(offers, choice.is_copied, strict=True)
    )


def _copied(offer: Offer, width: int) -> float:
    return 1.0 + sum(offer.reached[:width])


def _drafted(offer: Offer, head: int) -> float:
    return expected_tokens(offer.demand.acceptance or (), min(head, offer.demand.limit))
