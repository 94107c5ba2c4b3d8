"""Decides how many tokens the next round drafts: a fixed number, or the best by measured costs.

Pure: no clock, no arrays. Expected tokens of a round that drafts k, with p_j the probability that
draft j is accepted given that those before it were: 1 + p_1 + p_1 p_2 + … (Leviathan et al. 2022,
arXiv 2211.17192). The best k, which may be 0, has the most expected tokens per measured second;
other depths are tried at intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .costs import ENOUGH, RoundCosts, bounded

HYSTERESIS = 1.02
"""Ratio by which another depth must be better before it replaces the present one."""
MEMORY = 0.98
"""Decay of an observation's weight with each newer one: about the last 50 count."""
PRIOR_WEIGHT = 12.0
"""Weight of the model's other answers, in observations."""
LOOK_ROUNDS = ENOUGH
"""Rounds of one trial of another depth: as many as its cost needs."""
LOOK_TOKENS = 8
"""Plain tokens of a trial of depth 0: the first is not evaluated ahead, and the median counts."""
WORTH_A_LOOK = 0.85
"""A depth whose cost is only estimated is tried if its rate is this share of the best."""
LOOK_SHARE = 0.01
"""Expected loss of a trial, at most, as a share of the time since the last one of that depth."""
FIRST_STRETCH, LONGEST_STRETCH = 32, 512
"""Tokens between trials, doubled as long as trials change nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next rounds: `rounds` rounds of `k` drafts each; with k = 0 that many plain tokens."""

    k: int
    rounds: int


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same number of drafts."""

    k: int
    source: str = "as requested"
    """The source of `k`."""

    def plan(self, position: int) -> Plan:
        del position
        return Plan(self.k, 1 if self.k else LONGEST_STRETCH)

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        del k, accepted, position, seconds

    def reason(self, position: int) -> str:
        del position
        return f"K = {self.k} in every round: {self.source}"


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


class Acceptance(DecayedShares):
    """Shares of drafts that were accepted after the ones before them, by depth."""

    def add(self, drafted: int, accepted: int) -> None:
        """Counts a round. Drafts after the first rejected one are not observed."""
        for j in range(min(drafted, accepted + 1)):
            self.observe(j, is_hit=j < accepted)


def expected_tokens(probabilities: Sequence[float], k: int) -> float:
    """Expected tokens of a round of `k` drafts, the target's own last one included."""
    total, reached = 1.0, 1.0
    for p in probabilities[:k]:
        reached *= p
        total += reached
    return total


def speed_list(speeds: Sequence[float]) -> str:
    """The expected speeds of K = 0, 1, …, relative to plain decoding."""
    listed = ", ".join(f"{speed:.2f}" for speed in speeds)
    return f"expected speeds {listed} times plain decoding for K = 0 to {len(speeds) - 1}"


class AdaptiveDepth:
    """Chooses the depth from 0 to `ceiling` with the most expected tokens per second.

    It starts with the measurements of the model's other answers (`prior`, `costs`), or at `default`
    without any. At intervals it tries another depth: one whose cost is only estimated, else a
    neighbour: the text may have become easier to predict, or the machine slower or faster.
    """

    def __init__(
        self,
        ceiling: int,
        default: int,
        prior: "Prior",
        costs: RoundCosts,
        source: str = "the default",
    ) -> None:
        """`source`: where `default` comes from."""
        self._ceiling = ceiling
        self._source = source
        self._prior = prior
        self._costs = costs
        hits = [PRIOR_WEIGHT * prior.probability(j) for j in range(ceiling)]
        self.acceptance = Acceptance([PRIOR_WEIGHT] * ceiling, hits, MEMORY)
        self._k = min(default, ceiling)
        self._stretch = FIRST_STRETCH
        self._until_look = FIRST_STRETCH
        self._look: Exploration | None = None
        self._looks = 0
        self._learned = 0

    def plan(self, position: int) -> Plan:
        """The next rounds, after `position` committed rows."""
        if self._look is None:
            self._k = self._best(position)
            if self._until_look <= 0:
                self._look = self._next_look(position)
                if self._look is None:
                    self._until_look = self._stretch
        if self._look is not None:
            return Plan(self._look.k, 1 if self._look.k else self._look.rounds_left)
        return Plan(self._k, 1 if self._k else self._until_look)

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        """Records a round of `k` drafts, or a plain token (k = 0), that began at `position`."""
        is_trial = self._look is not None and k == self._look.k
        self._costs.add(position, k, seconds, is_trial=is_trial)
        self._learned += 1
        self.record(k, accepted)
        self._until_look -= 1 + accepted
        # Rounds that were issued before a trial are read during it.
        if self._look is not None and is_trial:
            self._look.rounds_left -= 1
            self._look.emitted += 1 + accepted
            if self._look.rounds_left == 0:
                self._end_look(self._look, position)

    def record(self, k: int, accepted: int) -> None:
        """Records the drafts of a round whose cost does not count, since others shared it."""
        if k:
            self.acceptance.add(k, accepted)
            self._prior.add(k, accepted)

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a plain token in a short context, as rounds of any depth show them, or None if
        this answer had too few of its own."""
        return self._costs.seconds(0, 0) if self._learned >= ENOUGH else None

    @property
    def speedup(self) -> float:
        """The best expected speed in a short context, relative to plain decoding; 0 if unknown."""
        rates = self._rates(0) if self._prior.is_known else []
        return max(rates) / rates[0] if rates else 0.0

    def reason(self, position: int) -> str:
        """Why rounds after `position` rows draft as many tokens as they do."""
        k = self._k if self._look is None else self._look.k
        rates = self._rates(position) if self._prior.is_known else []
        if not rates:
            return f"K = {k}, {self._source}, until enough is measured to choose by speed"
        speeds = speed_list([rate / rates[0] for rate in rates])
        if self._look is not None:
            return f"K = {k} is being tried; {speeds}"
        return f"K = {k} of at most {self._ceiling}: {speeds}"

    def _next_look(self, position: int) -> "Exploration | None":
        rates = self._rates(position)
        if not rates:  # no probe ran at load: each depth needs a measurement before they compare
            depths = range(self._ceiling + 1)
            unmeasured = (k for k in depths if self._costs.seconds(position, k) is None)
            return next((self._look_at(k, position) for k in unmeasured), None)
        for k, rate in enumerate(rates):
            promising = k != self._k and rate >= WORTH_A_LOOK * rates[self._k]
            if promising and not self._costs.is_measured(position, k):
                return self._look_at(k, position)
        neighbours = [self._k + 1, self._k - 1]
        for k in neighbours[:: 1 if self._looks % 2 == 0 else -1]:
            if 0 <= k <= self._ceiling and self._is_affordable(k, position, rates):
                self._looks += 1
                return self._look_at(k, position)
        return None

    def _is_affordable(self, k: int, position: int, rates: Sequence[float]) -> bool:
        """Whether a trial of a neighbouring depth may win, or loses little of the recent time.

        A deeper one may win if it would with its last draft accepted always. One that cannot is
        tried nevertheless, seldom, since its cost may have changed.
        """
        seconds = self._costs.seconds(position, k)
        if seconds is None or not self._costs.is_measured(position, k):
            return True
        tokens = rates[k] * seconds
        if k > self._k:
            tokens = expected_tokens([*self.acceptance.shares[: k - 1], 1.0], k)
        loss = _trial_rounds(k) * (seconds - tokens / rates[self._k])
        return loss <= LOOK_SHARE * self._costs.seconds_since_trial(k)

    def _look_at(self, k: int, position: int) -> "Exploration":
        self._costs.begin_trial(position, k)
        return Exploration(k, _trial_rounds(k))

    def _end_look(self, look: "Exploration", position: int) -> None:
        """Schedules the next trial: soon if this one went well, whatever the estimates are."""
        self._look = None
        seconds = self._costs.seconds(position, look.k)
        rates = self._rates(position)
        if not rates:
            self._until_look = 0
            return
        paid = seconds is not None and look.emitted / _trial_rounds(look.k) / seconds
        good = bool(paid) and paid > HYSTERESIS * rates[self._k]
        self._stretch = FIRST_STRETCH if good else min(2 * self._stretch, LONGEST_STRETCH)
        self._until_look = self._stretch

    def _best(self, position: int) -> int:
        """The present depth, unless another one is clearly better."""
        if not self._prior.is_known or not (rates := self._rates(position)):
            return self._k
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > HYSTERESIS * rates[self._k] else self._k

    def _rates(self, position: int) -> list[float]:
        """Tokens per second by depth; empty if the cost of some depth has no estimate."""
        p = self.acceptance.shares
        measured = [self._costs.seconds(position, k) for k in range(self._ceiling + 1)]
        seconds = [s for s in measured if s is not None]
        if len(seconds) < len(measured):
            return []
        return [expected_tokens(p, k) / s for k, s in enumerate(bounded(seconds))]


class RepeatableDepth(AdaptiveDepth):
    """Chooses by its own answer's acceptance and the seconds of the probe, so that the same request
    has the same rounds again.

    For verifies that may decide near ties otherwise than single steps: there the depths of an
    answer change its text, and neither the clock nor other answers may.
    """

    def __init__(
        self, ceiling: int, default: int, prior: "Prior", costs: RoundCosts, source: str
    ) -> None:
        """`prior`, `costs`: of all answers; they learn from this one, but for its choices only
        what was probed counts."""
        super().__init__(ceiling, default, Prior(), RoundCosts(costs.probed), source)
        self._shared_prior, self._measured = prior, costs

    def learn(self, k: int, accepted: int, position: int, seconds: float) -> None:
        self._measured.add(position, k, seconds)
        super().learn(k, accepted, position, self._costs.seconds(position, k) or 0.0)

    def record(self, k: int, accepted: int) -> None:
        super().record(k, accepted)
        self._shared_prior.add(k, accepted)

    @property
    def plain_seconds(self) -> float | None:
        return self._measured.seconds(0, 0) if self._learned >= ENOUGH else None


def _trial_rounds(k: int) -> int:
    return LOOK_ROUNDS if k else LOOK_TOKENS


@dataclass(slots=True)
class Exploration:
    """A trial of another depth: its remaining rounds and its emitted tokens so far."""

    k: int
    rounds_left: int
    emitted: int = 0


class Prior(Acceptance):
    """Acceptance over all answers of a model, with slow decay; shared by answers and saved."""

    ENOUGH = 8.0

    def __init__(self, counts: Sequence[float] = (), accepted: Sequence[float] = ()) -> None:
        """`counts[j]`: observations of draft j + 1, decayed; `accepted[j]`: of its acceptance."""
        super().__init__(counts, accepted, 0.998)

    @property
    def is_known(self) -> bool:
        """Whether first drafts were observed often enough."""
        return bool(self.counts) and self.counts[0] >= self.ENOUGH

    def probability(self, j: int) -> float:
        """Acceptance probability of draft j + 1, or of the deepest draft that was observed."""
        for depth in range(min(j, len(self.counts) - 1), -1, -1):
            if self.counts[depth] >= 1:
                return self.hits[depth] / self.counts[depth]
        return 0.5

    def add(self, drafted: int, accepted: int) -> None:
        missing = [0.0] * (min(drafted, accepted + 1) - len(self.counts))
        self.counts, self.hits = self.counts + missing, self.hits + missing
        super().add(drafted, accepted)


DepthPolicy: TypeAlias = FixedDepth | AdaptiveDepth
"""Decides depths for one answer and learns from its rounds."""
