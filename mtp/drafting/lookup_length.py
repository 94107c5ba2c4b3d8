"""Decides how many tokens a round copies: none, or the length with the most expected tokens for its
measured seconds. Pure: no clock, no arrays.

The chance that one more copied token is right grows with the number of tokens that the copy has in
common with the answer so far. Its evidence is free: each token of an answer shows whether the
index would have been right, drafted or not. So nothing is drafted to find out, and text that
repeats nothing pays nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from .costs import RoundCosts
from .depth import DecayedShares
from .lookup import Resumed

MATCH_LENGTHS: Final = (3, 4, 5, 8, 16)
"""The least match length of each class of evidence."""
FIRST_CHANCES: Final = (0.3, 0.4, 0.6, 0.85, 0.95, 0.5, 0.7)
"""Chances by class before anything was observed; the last two are of matches that resume."""
PRIOR_WEIGHT: Final = 4.0
"""Weight of the chances that an answer begins with, in observations."""
ANSWER_MEMORY: Final = 0.98
MODEL_MEMORY: Final = 0.998
"""Decay of an observation's weight with each newer one, of one answer and of all of them."""
MARGIN: Final = 1.05
"""Ratio of speeds from which on a copy is drafted: costs are measured with noise."""
RATE_MEMORY: Final = 0.9
"""Decay of a round in the speed without copies: about the last ten count."""
ENOUGH_ROUNDS: Final = 3


class CopyEvidence(DecayedShares):
    """Shares of tokens after a match that were right, by class of match length."""

    def __init__(
        self, chances: Sequence[float] = FIRST_CHANCES, memory: float = MODEL_MEMORY
    ) -> None:
        """`chances`: the shares to begin with."""
        hits = [PRIOR_WEIGHT * chance for chance in chances]
        super().__init__([PRIOR_WEIGHT] * len(chances), hits, memory)

    def add(self, length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        """Records whether the token after a match of `length` was right."""
        self.observe(_class_of(length, resumed), is_hit=is_right)


class LengthPolicy(Protocol):
    """Decides the lengths of one answer's copies and learns from its tokens and rounds."""

    @property
    def longest(self) -> int:
        """The longest copy that it may choose."""
        ...

    def choose(self, match_length: int, limit: int, position: int, *, resumed: Resumed = 0) -> int:
        """Tokens to copy after a match, from 0 to `limit`.

        `resumed`: see `Match`.
        """
        ...

    def reached(self, match_length: int, count: int, *, resumed: Resumed = 0) -> list[float]:
        """Chances that the first 1, 2, … copied tokens after a match stand, `count` at most."""
        ...

    def observe(self, match_length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        """Records whether the token after a match was right, drafted or not."""
        ...

    def learn_copy(self, length: int, position: int, seconds: float) -> None:
        """Records the cost of a round that copied."""
        ...

    def learn_other(self, drafted: int, tokens: int, position: int, seconds: float) -> None:
        """Records a round that did not copy; `drafted` by the model's own head."""
        ...


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """The costs of rounds that copy, on one machine; shared by the answers of a model."""

    verify: RoundCosts
    """Costs of rounds by number of copied tokens, 0 for a plain token."""
    rollback: Mapping[int, float]
    """Seconds to remove rejected rows of a copy, by its length."""

    def seconds(self, position: int, length: int, chance_of_all: float) -> float | None:
        """Expected seconds of a round; None if nothing was measured."""
        verify = self.verify.seconds(position, length)
        if verify is None:
            return None
        return verify + (1 - chance_of_all) * self.rollback.get(length, 0.0)


class AdaptiveLength:
    """Chooses among measured lengths by expected tokens per second.

    A copy must be faster than the rounds without one were lately, whatever drafts those have.
    """

    def __init__(self, lengths: Sequence[int], costs: CopyCosts, evidence: CopyEvidence) -> None:
        """`lengths`: ascending, not empty. `costs`, `evidence`: of the model, for all answers."""
        self._lengths = lengths
        self._costs = costs
        self._shared_evidence = evidence
        self._evidence = CopyEvidence(evidence.shares, ANSWER_MEMORY)
        self._tokens = self._seconds = 0.0
        """Tokens and seconds of the last rounds that did not copy, decayed."""
        self._rounds = 0

    @property
    def longest(self) -> int:
        return self._lengths[-1]

    def choose(self, match_length: int, limit: int, position: int, *, resumed: Resumed = 0) -> int:
        best, best_rate = 0, MARGIN * self._rate_without(position)
        if not best_rate:
            return 0
        reached = self.reached(match_length, limit, resumed=resumed)
        for length in self._lengths:
            if length > limit:
                break
            expected = 1.0 + sum(reached[:length])
            seconds = self._costs.seconds(position, length, reached[length - 1])
            if seconds is not None and expected / seconds > best_rate:
                best, best_rate = length, expected / seconds
        return best

    def reached(self, match_length: int, count: int, *, resumed: Resumed = 0) -> list[float]:
        chances, all_stand = self._evidence.shares, 1.0
        reached = list[float]()
        for copied in range(min(count, self.longest)):
            all_stand *= chances[_class_of(match_length + copied, 0 if copied else resumed)]
            reached.append(all_stand)
        return reached

    def observe(self, match_length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        for evidence in (self._evidence, self._shared_evidence):
            evidence.add(match_length, is_right=is_right, resumed=resumed)

    def learn_copy(self, length: int, position: int, seconds: float) -> None:
        self._costs.verify.add(position, length, seconds)

    def learn_other(self, drafted: int, tokens: int, position: int, seconds: float) -> None:
        if not drafted:
            self._costs.verify.add(position, 0, seconds)
        self._tokens = RATE_MEMORY * self._tokens + tokens
        self._seconds = RATE_MEMORY * self._seconds + seconds
        self._rounds += 1

    def _rate_without(self, position: int) -> float:
        """Tokens a second of rounds that do not copy; 0.0 if nothing was measured."""
        if self._rounds >= ENOUGH_ROUNDS and self._seconds > 0:
            return self._tokens / self._seconds
        plain = self._costs.verify.seconds(position, 0)
        return 1 / plain if plain else 0.0


def _class_of(length: int, resumed: Resumed) -> int:
    if resumed:
        return len(MATCH_LENGTHS) + resumed - 1
    kind = len(MATCH_LENGTHS) - 1
    while kind and length < MATCH_LENGTHS[kind]:
        kind -= 1
    return kind
