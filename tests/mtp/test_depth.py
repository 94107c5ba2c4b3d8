"""The depth that adaptive drafting settles on, by published acceptance and measured round costs."""

import random
from collections.abc import Callable, Sequence

import pytest

from exo_node.mtp.drafting.costs import ENOUGH, RECENT, RoundCosts, bucket_of
from exo_node.mtp.drafting.depth import (
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
        self.rounds = [0] * len(costs)
        """Rounds by depth, of all answers."""

    def expected_rate(self) -> float:
        """Expected tokens of all rounds, per plain step's time: their depths count, not luck."""
        depths = range(len(self.costs))
        tokens = sum(self.rounds[k] * expected_tokens(self.acceptance, k) for k in depths)
        return tokens / sum(self.rounds[k] * self.costs[k] for k in depths)

    def answer(self, policy: AdaptiveDepth, tokens: int = ANSWER) -> list[int]:
        """The tokens of an answer, by depth."""
        emitted, by_depth = 0, [0] * len(self.costs)
        while emitted < tokens:
            plan = policy.plan(100 + emitted)
            for _ in range(plan.rounds):
                accepted = self._accepted(plan.k)
                took = self.costs[plan.k] * self._random.gauss(1, 0.05)
                policy.learn(plan.k, accepted, 100 + emitted, took)
                emitted += 1 + accepted
                by_depth[plan.k] += 1 + accepted
                self.rounds[plan.k] += 1
        return by_depth

    def _accepted(self, k: int) -> int:
        for position in range(k):
            if self._random.random() >= self.acceptance[position]:
                return position
        return k


# Conditional acceptance by position, and costs of rounds in plain steps.
PROFILES = {
    "0.9/0.8/0.7": (0.9, 0.8, 0.7),
    "0.75/0.5/0.3": (0.75, 0.5, 0.3),
    "0.5/0.2/0.1": (0.5, 0.2, 0.1),
    "27B": DENSE_27B,
    "35B-A3B": MOE_35B,
    "unpredictable": UNPREDICTABLE,
}
COST_TABLES = {
    "M5 dense": M5_DENSE,
    "M5 mixture": M5_MOE,
    "H200 dense": (1.0, 1.17, 1.30, 1.44),
    "H200 mixture": (1.0, 1.35, 1.60, 1.85),
    "slow verify": SLOW_VERIFY,
    "rows are free": (1.0, 1.05, 1.10, 1.15),
    "the third draft is dear": (1.0, 1.1, 1.2, 2.5),
    "the first draft is dear": (1.0, 1.5, 1.55, 1.6),
}
UNPROBED = ("M5 dense", "rows are free", "the first draft is dear")
"""Cost tables of which nothing was measured at the start."""
PROBES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "drafts seem dearer": lambda costs: [c + 0.15 * k for k, c in enumerate(costs)],
    "none": lambda _: [],
}


@pytest.mark.parametrize(
    ("costs", "probe"),
    [*((costs, "drafts seem dearer") for costs in COST_TABLES), *((c, "none") for c in UNPROBED)],
)
@pytest.mark.parametrize("profile", PROFILES)
def test_without_a_card_it_is_within_three_percent_of_the_best_fixed_depth(
    profile: str, costs: str, probe: str
) -> None:
    """A head that was found without a card begins with one draft and may reach three."""
    acceptance, table = PROFILES[profile], COST_TABLES[costs]
    best = max(expected_tokens(acceptance, k) / table[k] for k in range(4))
    rates = list[float]()
    for seed in range(6):
        prior, measured = Prior(), RoundCosts(PROBES[probe](table))
        machine = Machine(acceptance, table, seed)
        for turn in range(3):
            _ = machine.answer(AdaptiveDepth(3, 1, prior, measured))
            if turn == 0:  # the first one has yet to learn
                machine.rounds = [0] * 4
        rates.append(machine.expected_rate())
    assert sum(rates) / len(rates) >= 0.97 * best


def test_the_text_says_which_depth_is_chosen_and_what_the_others_promise() -> None:
    policy = AdaptiveDepth(3, 1, Prior(), RoundCosts(M5_DENSE), "the model's default")
    assert policy.reason(100) == (
        "K = 1, the model's default, until enough is measured to choose by speed"
    )
    policy = AdaptiveDepth(3, 1, Prior([90.0] * 3, [81.0] * 3), RoundCosts(M5_DENSE))
    assert policy.plan(100).k == 3
    assert policy.reason(100) == (
        "K = 3 of at most 3: expected speeds 1.00, 1.75, 2.13, 2.25 times plain decoding for "
        "K = 0 to 3"
    )
    assert FixedDepth(2, "the request's num_draft_tokens").reason(100) == (
        "K = 2 in every round: the request's num_draft_tokens"
    )


def test_a_depth_that_cannot_pay_is_tried_seldom_once_its_cost_is_measured() -> None:
    """Each answer looked three times at a depth that cost twice what it could win."""
    costs, prior = RoundCosts((1.0, 1.1, 1.2, 2.5)), Prior()
    machine = Machine(DENSE_27B, (1.0, 1.1, 1.2, 2.5), 0)
    by_depth = [0] * 4
    for _ in range(20):
        counted = machine.answer(AdaptiveDepth(3, 1, prior, costs))
        by_depth = [a + b for a, b in zip(by_depth, counted, strict=True)]
    assert 0 < by_depth[3] < 0.04 * sum(by_depth)
    assert by_depth[2] > 0.9 * sum(by_depth)


@pytest.mark.parametrize("best", [0, 1])
def test_a_depth_that_became_cheaper_is_chosen_again(best: int) -> None:
    """The machine was busy when it was measured; rounds at the chosen depth cannot show that."""
    costs = RoundCosts()
    for k, seconds in enumerate((1.0, 1.3, 1.9)):
        for _ in range(RECENT):
            costs.add(100, k, 3 * seconds if k == best else seconds)
    prior, table = Prior([90.0] * 2, [60.0, 40.0]), (1.0, 1.3, 1.9)
    acceptance = (0.7, 0.4) if best else (0.1, 0.1)
    machine, by_depth = Machine(acceptance, table, 0), list[int]()
    for _ in range(10):
        by_depth = machine.answer(AdaptiveDepth(2, 2, prior, costs))
    assert by_depth[best] > 0.8 * sum(by_depth)


def test_where_drafting_loses_it_parks_and_looks_ever_more_seldom() -> None:
    policy = AdaptiveDepth(3, 2, Prior(), RoundCosts(SLOW_VERIFY))
    machine = Machine(UNPREDICTABLE, SLOW_VERIFY, 0)
    _ = machine.answer(policy)
    by_depth = machine.answer(policy, 2000)
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
    parked = Machine(UNPREDICTABLE, M5_MOE, 0).answer(policy, 1000)
    assert parked[0] > 0.8 * sum(parked)  # a first draft loses 3 % there
    by_depth = Machine((0.95, 0.95), M5_MOE[:3], 1).answer(policy, 2 * LONGEST_STRETCH)
    assert by_depth[2] > by_depth[0]


def test_it_never_drafts_more_than_its_ceiling() -> None:
    policy = AdaptiveDepth(1, 1, Prior(), RoundCosts(M5_DENSE))
    by_depth = Machine(DENSE_27B, M5_DENSE, 0).answer(policy, 1000)
    assert by_depth[2:] == [0, 0]


def test_until_anything_is_known_it_drafts_the_default() -> None:
    policy = AdaptiveDepth(3, 2, Prior(), RoundCosts())
    assert policy.plan(0) == Plan(2, 1)


def test_without_a_probe_it_measures_every_depth_before_it_settles() -> None:
    """It once stayed at its ceiling for ever: with one depth unknown nothing was compared."""
    policy = AdaptiveDepth(3, 3, Prior(), RoundCosts())
    machine = Machine(UNPREDICTABLE, SLOW_VERIFY, 0)
    _ = machine.answer(policy)
    by_depth = machine.answer(policy, 2000)
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


def test_a_slower_machine_slows_the_depths_that_are_not_measured_at_present() -> None:
    costs = RoundCosts()
    for _ in range(RECENT):
        costs.add(0, 0, 1.0)
        costs.add(0, 1, 1.5)
    for _ in range(RECENT):
        costs.add(0, 1, 3.0)
    assert (costs.seconds(0, 0), costs.seconds(0, 1)) == (2.0, 3.0)


def test_what_is_measured_again_replaces_old_measurements_sooner() -> None:
    costs = RoundCosts()
    for _ in range(RECENT):
        costs.add(0, 0, 1.0)
        costs.add(0, 1, 4.0)
    costs.begin_trial(0, 1)
    for _ in range(ENOUGH + 1):
        costs.add(0, 1, 2.0)
    assert costs.seconds(0, 1) == pytest.approx(2.0)


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


@pytest.mark.parametrize("disturbed", range(4))
def test_no_depth_is_expected_to_give_more_than_its_tokens(disturbed: int) -> None:
    """A probe on a busy machine said that K = 2 is 6.99 times as fast as plain decoding."""
    table = [1.0, 1.1, 1.2, 1.3]
    table[disturbed] *= 7
    policy = AdaptiveDepth(3, 1, Prior([90.0] * 3, [81.0] * 3), RoundCosts(table))
    _ = policy.plan(100)
    listed = policy.reason(100).partition("speeds ")[2].partition(" times")[0]
    assert all(float(speed) <= k + 1 for k, speed in enumerate(listed.split(", "))), listed


def test_a_disturbed_plain_step_does_not_make_the_deepest_draft_look_best() -> None:
    costs = RoundCosts([7.0, 1.1, 5.0, 5.2])
    assert AdaptiveDepth(3, 1, Prior([90.0] * 3, [45.0] * 3), costs).plan(100).k == 1


@pytest.mark.parametrize("disturbed", [0.1, 1.0, 10.0])
def test_drafted_rounds_show_a_plain_step_although_the_probe_was_disturbed(
    disturbed: float,
) -> None:
    policy = AdaptiveDepth(3, 2, Prior(), RoundCosts([disturbed * cost for cost in M5_DENSE]))
    for _ in range(2):
        policy.learn(2, 1, 100, M5_DENSE[2])
    assert policy.plain_seconds is None
    policy.learn(2, 1, 100, M5_DENSE[2])
    assert policy.plain_seconds == pytest.approx(M5_DENSE[0])


def test_the_speedup_is_that_of_the_best_depth_and_at_most_its_tokens() -> None:
    assert AdaptiveDepth(3, 1, Prior(), RoundCosts(M5_DENSE)).speedup == 0.0
    always = Prior([90.0] * 3, [90.0] * 3)
    assert AdaptiveDepth(3, 1, always, RoundCosts([9.0, 1.0, 1.0, 1.0])).speedup == 4.0
    assert AdaptiveDepth(3, 1, always, RoundCosts([1.0, 9.0, 9.0, 9.0])).speedup == 1.0
    assert AdaptiveDepth(3, 1, always, RoundCosts()).speedup == 0.0
    assert AdaptiveDepth(0, 0, always, RoundCosts(M5_DENSE)).speedup == 1.0
