"""The depth that adaptive drafting settles on, by published acceptance and measured round costs."""

import random
from collections.abc import Sequence

import pytest

from exo_node.mtp.costs import ENOUGH, RECENT, RoundCosts, bucket_of
from exo_node.mtp.depth import (
    LONGEST_STRETCH,
    LOOK_ROUNDS,
    AdaptiveDepth,
    FixedDepth,
    Plan,
    Prior,
    expected_tokens,
)

# Conditional acceptance by position, from the shares that exo#2110 publishes for K = 1, 2, 3
# (accepted of proposed): 85.7/75.4/66.4 % for the 27B, 55.8/38.3/27.4 % for the 35B-A3B.
DENSE_27B = (0.857, 0.760, 0.743)
MOE_35B = (0.558, 0.373, 0.269)
UNPREDICTABLE = (0.30, 0.20, 0.10)
# A round in plain steps. M5 Max: tokens a round over exo#2110's speed-ups. H200: bench/results.
M5_DENSE = (1.0, 1.086, 1.273, 1.527)
M5_MOE = (1.0, 1.343, 1.635, 1.918)
SLOW_VERIFY = (1.0, 1.7, 2.4, 3.1)
ANSWER = 256


def test_the_published_shares_follow_from_the_conditional_ones() -> None:
    for profile, shares in (
        (DENSE_27B, (0.857, 0.754, 0.664)),
        (MOE_35B, (0.558, 0.383, 0.274)),
    ):
        for k, share in enumerate(shares, 1):
            assert (expected_tokens(profile, k) - 1) / k == pytest.approx(share, abs=2e-3)


class Machine:
    """Plays rounds whose acceptance and cost are given, as the loop would drive a policy."""

    def __init__(self, acceptance: Sequence[float], costs: Sequence[float], seed: int) -> None:
        self.acceptance, self.costs = acceptance, costs
        self._random = random.Random(seed)

    def answer(self, policy: AdaptiveDepth, tokens: int = ANSWER) -> tuple[float, list[int]]:
        """(tokens per plain step's time, tokens by depth)."""
        seconds, emitted, by_depth = 0.0, 0, [0] * len(self.costs)
        while emitted < tokens:
            plan = policy.plan(100 + emitted)
            for _ in range(plan.rounds):
                accepted = self._accepted(plan.k)
                took = self.costs[plan.k] * self._random.gauss(1, 0.05)
                policy.learn(plan.k, accepted, 100 + emitted, took)
                seconds += took
                emitted += 1 + accepted
                by_depth[plan.k] += 1 + accepted
        return emitted / seconds, by_depth

    def _accepted(self, k: int) -> int:
        for position in range(k):
            if self._random.random() >= self.acceptance[position]:
                return position
        return k


@pytest.mark.parametrize(
    ("acceptance", "costs", "best"),
    [
        (DENSE_27B, M5_DENSE, 2),
        (DENSE_27B, M5_MOE, 3),
        (DENSE_27B, SLOW_VERIFY, 1),
        (MOE_35B, M5_DENSE, 1),
        (MOE_35B, M5_MOE, 1),
        (MOE_35B, SLOW_VERIFY, 0),
        (UNPREDICTABLE, M5_MOE, 0),
        (UNPREDICTABLE, SLOW_VERIFY, 0),
    ],
)
def test_it_is_within_three_percent_of_the_best_fixed_depth(
    acceptance: Sequence[float], costs: Sequence[float], best: int
) -> None:
    rates = [expected_tokens(acceptance, k) / costs[k] for k in range(4)]
    assert rates.index(max(rates)) == best
    reached: list[float] = []
    for seed in range(10):
        # Probed at load: each part waited for, so 10 % above what overlapping rounds cost.
        prior, costs_before = Prior(), RoundCosts([1.1 * cost for cost in costs])
        machine = Machine(acceptance, costs, seed)
        answers = [machine.answer(AdaptiveDepth(3, 2, prior, costs_before))[0] for _ in range(6)]
        reached += answers[1:]  # the first one has yet to learn
    assert sum(reached) / len(reached) >= 0.97 * max(rates)


def test_a_fixed_depth_would_not_be_that_near() -> None:
    rates = [expected_tokens(UNPREDICTABLE, k) / SLOW_VERIFY[k] for k in range(4)]
    assert max(rates[1:]) < 0.97 * rates[0]


def test_where_drafting_loses_it_parks_and_looks_ever_more_seldom() -> None:
    policy = AdaptiveDepth(3, 2, Prior(), RoundCosts(SLOW_VERIFY))
    machine = Machine(UNPREDICTABLE, SLOW_VERIFY, 0)
    _ = machine.answer(policy)
    _, by_depth = machine.answer(policy, 2000)
    assert by_depth[0] > 0.97 * sum(by_depth)
    assert sum(by_depth[1:]) > 0


def test_a_look_ends_after_rounds_of_its_own_depth_only() -> None:
    """Results of rounds that began before the look arrive during it."""
    policy = AdaptiveDepth(2, 1, Prior(), RoundCosts([1.0, 1.1, 5.0]))
    while (looked_at := policy.plan(100).k) == 1:
        policy.learn(1, 1, 100, 1.1)
    assert looked_at == 2
    for _ in range(LOOK_ROUNDS):
        policy.learn(1, 1, 100, 1.1)
        assert policy.plan(100).k == 2
    for _ in range(LOOK_ROUNDS):
        assert policy.plan(100).k == 2
        policy.learn(2, 2, 100, 5.0)
    assert policy.plan(100).k == 1


def test_a_parked_drafter_returns_when_the_text_becomes_predictable() -> None:
    policy = AdaptiveDepth(2, 2, Prior(), RoundCosts(M5_MOE))
    _, parked = Machine(UNPREDICTABLE, M5_MOE, 0).answer(policy, 1000)
    assert parked[0] > 0.9 * sum(parked)
    _, by_depth = Machine((0.95, 0.95), M5_MOE[:3], 1).answer(policy, 2 * LONGEST_STRETCH)
    assert by_depth[2] > by_depth[0]


def test_it_never_drafts_more_than_its_ceiling() -> None:
    policy = AdaptiveDepth(1, 1, Prior(), RoundCosts(M5_DENSE))
    _, by_depth = Machine(DENSE_27B, M5_DENSE, 0).answer(policy, 1000)
    assert by_depth[2:] == [0, 0]


def test_until_anything_is_known_it_drafts_the_default() -> None:
    policy = AdaptiveDepth(3, 2, Prior(), RoundCosts())
    assert policy.plan(0) == Plan(2, 1)


def test_without_a_probe_it_measures_every_depth_before_it_settles() -> None:
    """It once stayed at its ceiling for ever: with one depth unknown nothing was compared."""
    policy = AdaptiveDepth(3, 3, Prior(), RoundCosts())
    machine = Machine(UNPREDICTABLE, SLOW_VERIFY, 0)
    _ = machine.answer(policy)
    _, by_depth = machine.answer(policy, 2000)
    assert by_depth[0] > 0.95 * sum(by_depth)


def test_what_other_answers_showed_decides_the_first_round() -> None:
    prior = Prior([100.0, 30.0], [30.0, 6.0])
    assert AdaptiveDepth(2, 2, prior, RoundCosts(SLOW_VERIFY)).plan(0).k == 0
    prior = Prior([100.0, 90.0], [95.0, 85.0])
    assert AdaptiveDepth(2, 1, prior, RoundCosts(M5_DENSE)).plan(0).k == 2


def test_a_fixed_depth_stays() -> None:
    policy = FixedDepth(2)
    policy.learn(2, 0, 10, 1.0)
    assert policy.plan(10) == Plan(2, 1)
    assert FixedDepth(0).plan(10).k == 0


# ---------------------------------------------------------------- costs


def test_contexts_are_told_apart_by_doubling() -> None:
    assert [bucket_of(n) for n in (0, 511, 512, 1023, 1024, 2048, 100_000)] == [
        *(0, 0, 1, 1, 2, 3, 8)
    ]


def test_a_figure_is_the_median_of_recent_measurements() -> None:
    costs = RoundCosts()
    for seconds in (1.0, 9.0, 2.0):
        costs.add(0, 1, seconds)
    assert costs.seconds(0, 1) == 2.0
    for _ in range(RECENT):
        costs.add(0, 1, 5.0)
    assert costs.seconds(0, 1) == 5.0


def test_too_few_measurements_do_not_replace_the_probe() -> None:
    costs = RoundCosts([1.0, 1.5])
    for _ in range(ENOUGH - 1):
        costs.add(0, 1, 9.0)
    assert costs.seconds(0, 1) == 1.5
    assert not costs.is_measured(0, 1)
    costs.add(0, 1, 9.0)
    assert costs.seconds(0, 1) == 9.0


def test_a_depth_that_was_only_probed_is_scaled_by_one_that_was_measured() -> None:
    costs = RoundCosts([1.0, 2.0])
    for _ in range(ENOUGH):
        costs.add(0, 0, 0.5)
    assert costs.seconds(0, 1) == 1.0


def test_a_context_that_was_not_measured_is_scaled_from_the_nearest_that_was() -> None:
    costs = RoundCosts()
    for _ in range(ENOUGH):
        costs.add(0, 0, 1.0)
        costs.add(0, 1, 1.5)
        costs.add(4096, 0, 2.0)
    assert costs.seconds(4096, 1) == 3.0
    assert RoundCosts().seconds(0, 0) is None
