"""Shares of drafts, and of copied tokens, that the target accepted. Newer ones weigh more."""

from collections.abc import Sequence
from typing import Final

from .lookup import Resumed

ANSWER_MEMORY: Final = 0.98
"""Decay of an observation's weight with each newer one: about the last 50 count."""
MODEL_MEMORY: Final = 0.998
"""The same for all answers of a model."""
UNSEEN: Final = 0.9
"""Acceptance of a draft that was never observed, relative to the one before it: drafts further on
are accepted less often, so that K grows by trials, not by leaps."""
PRIOR_WEIGHT: Final = 12.0
"""Weight of the model's other answers at the beginning of one, in observations."""
MATCH_LENGTHS: Final = (3, 4, 5, 8, 16)
"""The least match length of each class of copied tokens."""
FIRST_CHANCES: Final = (0.3, 0.4, 0.6, 0.85, 0.95, 0.5, 0.7)
"""Chances by class before anything was observed; the last two are of matches that resume."""
CHANCE_WEIGHT: Final = 4.0
"""Weight of the chances that an answer begins with, in observations."""


class DecayedShares:
    """Counts of observations and of the hits among them, by kind; newer ones weigh more."""

    def __init__(self, counts: Sequence[float], hits: Sequence[float], memory: float) -> None:
        """`memory`: decay of an observation's weight with each newer one of its kind."""
        self.counts: list[float] = list(counts)
        self.hits: list[float] = list(hits)
        self._memory = memory

    def observe(self, kind: int, *, is_hit: bool) -> None:
        self.counts[kind] = self._memory * self.counts[kind] + 1
        self.hits[kind] = self._memory * self.hits[kind] + is_hit

    @property
    def shares(self) -> list[float]:
        """The share of hits, by kind."""
        return [hits / count for hits, count in zip(self.hits, self.counts, strict=True)]


class Prior(DecayedShares):
    """Shares of drafts that were accepted after the ones before them, by depth, over all answers of
    a model; saved."""

    ENOUGH = 8.0

    def __init__(self, counts: Sequence[float] = (), accepted: Sequence[float] = ()) -> None:
        """`counts[j]`: observations of draft j + 1, decayed; `accepted[j]`: of its acceptance."""
        super().__init__(counts, accepted, MODEL_MEMORY)

    @property
    def is_known(self) -> bool:
        """Whether first drafts were observed often enough."""
        return bool(self.counts) and self.counts[0] >= self.ENOUGH

    def probability(self, j: int) -> float:
        """Acceptance probability of draft j + 1, by the deepest one so far that was observed."""
        for depth in range(min(j, len(self.counts) - 1), -1, -1):
            if self.counts[depth] >= 1:
                return self.hits[depth] / self.counts[depth] * UNSEEN ** (j - depth)
        return 0.5

    def add(self, drafted: int, accepted: int) -> None:
        """Counts a round. Drafts after the first rejected one are not observed."""
        for j in range(min(drafted, accepted + 1)):
            if j == len(self.counts):
                self.counts.append(0.0)
                self.hits.append(0.0)
            self.observe(j, is_hit=j < accepted)


class Acceptance(DecayedShares):
    """The same shares of one answer, which begin with those of the model's others."""

    def __init__(self, most: int, prior: Prior, *, is_own: bool = False) -> None:
        """`most`: drafts of a round at most. `is_own`: whether other answers change nothing."""
        self._priors = [Prior(), prior] if is_own else [prior]
        hits = [PRIOR_WEIGHT * self._priors[0].probability(j) for j in range(most)]
        super().__init__([PRIOR_WEIGHT] * most, hits, ANSWER_MEMORY)

    @property
    def is_known(self) -> bool:
        """See `Prior`."""
        return self._priors[0].is_known

    def add(self, drafted: int, accepted: int) -> None:
        """See `Prior`."""
        for j in range(min(drafted, accepted + 1)):
            self.observe(j, is_hit=j < accepted)
        for prior in self._priors:
            prior.add(drafted, accepted)


class CopyEvidence(DecayedShares):
    """Shares of tokens after a match that were right, by class of match length.

    They grow with the number of tokens that the copy has in common with the answer so far. Each
    token of an answer shows whether the index would have been right, drafted or not. So nothing is
    drafted to find out, and text that repeats nothing pays nothing.
    """

    def __init__(
        self, longest: int = 0, shared: "CopyEvidence | None" = None, memory: float = MODEL_MEMORY
    ) -> None:
        """`longest`: tokens that a round may copy. `shared`: of the model's other answers, with
        whose shares this one begins, and which learns with it."""
        chances = FIRST_CHANCES if shared is None else shared.shares
        hits = [CHANCE_WEIGHT * chance for chance in chances]
        super().__init__([CHANCE_WEIGHT] * len(chances), hits, memory)
        self.longest = longest
        self._shared = shared

    def of_answer(self, longest: int) -> "CopyEvidence":
        """The evidence of one answer, which copies up to `longest` tokens a round."""
        return CopyEvidence(longest, self, ANSWER_MEMORY)

    def add(self, match_length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        """Records whether the token after a match was right. `resumed`: see `Match`."""
        self.observe(_class_of(match_length, resumed), is_hit=is_right)
        if self._shared is not None:
            self._shared.add(match_length, is_right=is_right, resumed=resumed)

    def reached(self, match_length: int, count: int, *, resumed: Resumed = 0) -> list[float]:
        """Chances that the first 1, 2, … copied tokens after a match stand, `count` at most."""
        chances, all_stand = self.shares, 1.0
        reached = list[float]()
        for copied in range(min(count, self.longest)):
            all_stand *= chances[_class_of(match_length + copied, 0 if copied else resumed)]
            reached.append(all_stand)
        return reached


def _class_of(length: int, resumed: Resumed) -> int:
    if resumed:
        return len(MATCH_LENGTHS) + resumed - 1
    kind = len(MATCH_LENGTHS) - 1
    while kind and length < MATCH_LENGTHS[kind]:
        kind -= 1
    return kind
