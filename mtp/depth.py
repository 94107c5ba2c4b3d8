"""How many tokens the next round drafts: a fixed number, or what the measured costs say pays.

Pure: no clock, no arrays. Expected tokens of a round that drafts k, with p_j the probability that
draft j is accepted given that those before it were: 1 + p_1 + p_1 p_2 + … (Leviathan et al. 2022,
arXiv 2211.17192). The best k is the one with the most expected tokens for its measured seconds;
0 is one of them: where drafting loses, the drafter is parked and asked again now and then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .costs import ENOUGH, RoundCosts

HYSTERESIS = 1.02
"""Another depth must promise this much more before it replaces the present one."""
MEMORY = 0.97
"""Weight that an observation keeps with each newer one: about the last 33 count."""
PRIOR_WEIGHT = 6.0
"""Observations that what other answers of this model showed counts for."""
LOOK_ROUNDS = ENOUGH
"""Rounds of one look at another depth: as many as make its cost known."""
LOOK_TOKENS = 8
"""Plain tokens of a look at 0: the first of them is not evaluated ahead, and the median counts."""
WORTH_A_LOOK = 0.85
"""A depth whose cost was only estimated is measured if it promises this share of the best."""
FIRST_STRETCH, LONGEST_STRETCH = 32, 512
"""Tokens between looks, doubled while looking changes nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next rounds: `rounds` times `k` drafts; with k = 0 that many plain tokens."""

    k: int
    rounds: int


class DepthPolicy(Protocol):
    """Decides depths for one answer and learns from what came of them."""

    def plan(self, position: int) -> Plan:
        """What to do behind `position` committed rows."""
        ...

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        """One round of `k` drafts, or one plain token (k = 0), began at `position`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same number of drafts."""

    k: int

    def plan(self, position: int) -> Plan:
        del position
        return Plan(self.k, 1 if self.k else LONGEST_STRETCH)

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        del k, accepted, position, seconds


class Acceptance:
    """Probabilities that draft j is accepted after the ones before it, from decayed counts."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_WEIGHT) -> None:
        """`prior[j]` counts for `weight` observations of draft j + 1."""
        self._seen = [weight] * len(prior)
        self._accepted = [weight * p for p in prior]

    def add(self, drafted: int, accepted: int) -> None:
        """The drafts behind the first rejected one show nothing."""
        for j in range(min(drafted, accepted + 1)):
            self._seen[j] = MEMORY * self._seen[j] + 1
            self._accepted[j] = MEMORY * self._accepted[j] + (j < accepted)

    @property
    def probabilities(self) -> list[float]:
        return [a / n for a, n in zip(self._accepted, self._seen, strict=True)]


def expected_tokens(probabilities: Sequence[float], k: int) -> float:
    """Tokens that a round of `k` drafts emits on average, its own last one among them."""
    total, reached = 1.0, 1.0
    for p in probabilities[:k]:
        reached *= p
        total += reached
    return total


class AdaptiveDepth:
    """The depth of 0 to `ceiling` with the most expected tokens a second.

    It starts from what the model's other answers showed (`prior`, `costs`), and at `default` where
    none did. Now and then it looks at another depth: at one whose cost is only estimated, else at
    the next deeper one, as the text may have become easier to predict.
    """

    def __init__(self, ceiling: int, default: int, prior: "Prior", costs: RoundCosts) -> None:
        self._ceiling = ceiling
        self._prior = prior
        self._costs = costs
        self.acceptance = Acceptance([prior.probability(j) for j in range(ceiling)])
        self._k = min(default, ceiling)
        self._stretch = FIRST_STRETCH
        self._until_look = FIRST_STRETCH
        self._look: Exploration | None = None

    def plan(self, position: int) -> Plan:
        if self._look is None:
            self._k = self._best(position)
            if self._until_look > 0:
                return Plan(self._k, 1 if self._k else self._until_look)
            self._look = self._next_look(position)
            if self._look is None:
                self._until_look = self._stretch
                return Plan(self._k, 1 if self._k else self._until_look)
        return Plan(self._look.k, 1 if self._look.k else self._look.left)

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        self._costs.add(position, k, seconds)
        self.saw(k, accepted)
        self._until_look -= 1 + accepted
        # Rounds that were begun before a look are read during it.
        if self._look is not None and k == self._look.k:
            self._look.left -= 1
            self._look.emitted += 1 + accepted
            if self._look.left == 0:
                self._end_look(self._look, position)

    def saw(self, k: int, accepted: int) -> None:
        """What became of `k` drafts, in a round whose cost tells nothing here."""
        if k:
            self.acceptance.add(k, accepted)
            self._prior.add(k, accepted)

    def _next_look(self, position: int) -> "Exploration | None":
        rates = self._rates(position)
        if not rates:  # nothing compares until each depth has a figure: no probe ran at load
            depths = range(self._ceiling + 1)
            unseen = (k for k in depths if self._costs.seconds(position, k) is None)
            return next((self._look_at(k) for k in unseen), None)
        for k, rate in enumerate(rates):
            promising = k != self._k and rate >= WORTH_A_LOOK * rates[self._k]
            if promising and not self._costs.known(position, k):
                return self._look_at(k)
        return self._look_at(self._k + 1) if self._k < self._ceiling else None

    @staticmethod
    def _look_at(k: int) -> "Exploration":
        return Exploration(k, LOOK_ROUNDS if k else LOOK_TOKENS)

    def _end_look(self, look: "Exploration", position: int) -> None:
        """Looks again soon where the look itself went well, whatever the estimates say yet."""
        self._look = None
        rounds = LOOK_ROUNDS if look.k else LOOK_TOKENS
        seconds = self._costs.seconds(position, look.k)
        rates = self._rates(position)
        if not rates:
            self._until_look = 0
            return
        paid = seconds is not None and look.emitted / rounds / seconds
        good = bool(paid) and paid > HYSTERESIS * rates[self._k]
        self._stretch = FIRST_STRETCH if good else min(2 * self._stretch, LONGEST_STRETCH)
        self._until_look = self._stretch

    def _best(self, position: int) -> int:
        """The present depth unless another promises clearly more."""
        if not self._prior.known or not (rates := self._rates(position)):
            return self._k
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > HYSTERESIS * rates[self._k] else self._k

    def _rates(self, position: int) -> list[float]:
        """Tokens a second by depth, empty where some depth's cost is not even estimated."""
        p = self.acceptance.probabilities
        seconds = [self._costs.seconds(position, k) for k in range(self._ceiling + 1)]
        if any(s is None for s in seconds):
            return []
        return [expected_tokens(p, k) / s for k, s in enumerate(seconds) if s is not None]


@dataclass(slots=True)
class Exploration:
    """A few rounds at another depth: what is left of them, and what they emitted."""

    k: int
    left: int
    emitted: int = 0


class Prior:
    """What all answers of a model showed about its drafts, slowly forgotten; shared and saved."""

    MEMORY = 0.998
    ENOUGH = 8.0

    def __init__(self, seen: Sequence[float] = (), accepted: Sequence[float] = ()) -> None:
        self.seen = list(seen)
        self.accepted = list(accepted)

    @property
    def known(self) -> bool:
        """Whether first drafts were seen often enough to say anything."""
        return bool(self.seen) and self.seen[0] >= self.ENOUGH

    def probability(self, j: int) -> float:
        """Of draft j + 1; of depths never seen, that of the deepest one that was."""
        for depth in range(min(j, len(self.seen) - 1), -1, -1):
            if self.seen[depth] >= 1:
                return self.accepted[depth] / self.seen[depth]
        return 0.5

    def add(self, drafted: int, accepted: int) -> None:
        reached = min(drafted, accepted + 1)
        missing = reached - len(self.seen)
        self.seen += [0.0] * missing
        self.accepted += [0.0] * missing
        for j in range(reached):
            self.seen[j] = self.MEMORY * self.seen[j] + 1
            self.accepted[j] = self.MEMORY * self.accepted[j] + (j < accepted)
