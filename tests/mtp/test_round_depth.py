"""The K that rounds settle on, by published acceptance and measured costs."""

import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from exo_node.mtp.drafting.acceptance import Acceptance, Prior
from exo_node.mtp.drafting.costs import ENOUGH, CostTable, Form
from exo_node.mtp.drafting.depth_reason import depth_reason
from exo_node.mtp.drafting.round_policy import (
    PLAIN_TRIAL_ROUNDS,
    TRIAL_EVERY,
    TRIAL_ROUNDS,
    DraftDemand,
    Offer,
    RoundPolicy,
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
SURE = (0.95, 0.9, 0.85)
POOR = (0.2, 0.1, 0.1)


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """Counted another way: of each number of accepted drafts its probability."""
    total, reached = 0.0, 1.0
    for count in range(k):
        total += (count + 1) * reached * (1 - acceptance[count])
        reached *= acceptance[count]
    return total + (k + 1) * reached


def adaptive(most: int = 3, initial: int = 1, prior: Prior | None = None) -> DraftDemand:
    acceptance = Acceptance(most, prior or Prior())
    return DraftDemand(most, "the model's default", acceptance, initial)


def sure_of(acceptance: Sequence[float]) -> DraftDemand:
    """An answer whose acceptance is known."""
    prior = Prior([90.0] * len(acceptance), [90 * p for p in acceptance])
    return adaptive(len(acceptance), 0, prior)


def chosen(policy: RoundPolicy, demand: DraftDemand) -> int:
    """The K of the next round of an answer that is alone."""
    return policy.choose([Offer(demand, demand.most)], 100).k


def measure(costs: CostTable, k: int, seconds: float, size: int = 1) -> None:
    for _ in range(ENOUGH):
        costs.add(Form.of(size, 100, k, k), seconds / size)


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

    def answer(self, policy: RoundPolicy, demand: DraftDemand, tokens: int = ANSWER) -> list[int]:
        """The tokens of an answer, by depth."""
        emitted, by_depth = 0, [0] * len(self.costs)
        while emitted < tokens:
            k = policy.choose([Offer(demand, demand.most)], 100 + emitted).k
            accepted, took = self._accepted(k), self.took(k)
            policy.learn(1, 100 + emitted, k, k, took)
            if k and demand.acceptance is not None:
                demand.acceptance.add(k, accepted)
            emitted += 1 + accepted
            by_depth[k] += 1 + accepted
            self.rounds[k] += 1
        return by_depth

    def took(self, k: int) -> float:
        """Seconds of a round of `k` drafts."""
        return self.costs[k] * self._random.gauss(1, 0.05)

    def _accepted(self, k: int) -> int:
        for position in range(k):
            if self._random.random() >= self.acceptance[position]:
                return position
        return k


class BusyMachine(Machine):
    """In stretches of a few rounds other programs slow all that it does."""

    stretch, slowdown = 0, 1.0

    def took(self, k: int) -> float:
        if not self.stretch:
            self.stretch = self._random.choice((3, 5, 8, 15, 30, 60))
            self.slowdown = self._random.choice((1, 1, 1, 1.15, 1.3, 1.6, 2.5))
        self.stretch -= 1
        return self.slowdown * super().took(k)


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
        prior, policy = Prior(), RoundPolicy(CostTable(PROBES[probe](table)))
        machine = Machine(acceptance, table, seed)
        for turn in range(3):
            _ = machine.answer(policy, adaptive(prior=prior))
            if turn == 0:  # the first one has yet to learn
                machine.rounds = [0] * 4
        rates.append(machine.expected_rate())
    assert sum(rates) / len(rates) >= 0.97 * best


def test_other_programs_hardly_change_the_depth_that_is_chosen() -> None:
    """Depths are compared although they were measured in different stretches."""
    acceptance, table, rates = (0.99, 0.92, 0.87), (1.0, 1.49, 1.9, 2.37), list[float]()
    best = max(expected_tokens(acceptance, k) / table[k] for k in range(4))
    for seed in range(48):
        prior, policy = Prior(), RoundPolicy(CostTable(table))
        machine = BusyMachine(acceptance, table, seed)
        for _ in range(60):
            _ = machine.answer(policy, adaptive(3, 3, prior), 45)
        rates.append(machine.expected_rate() / best)
    assert sum(rates) / len(rates) > 0.978, rates


def test_the_text_says_which_depth_is_chosen_and_what_the_others_promise() -> None:
    policy, demand = RoundPolicy(CostTable(M5_DENSE)), adaptive()
    unknown = "K = 1, the model's default, until enough is measured to choose by speed"
    assert depth_reason(policy, demand, None) == unknown
    assert depth_reason(policy, demand, policy.choose([Offer(demand, 3)])) == unknown
    demand = sure_of([0.9] * 3)
    choice = policy.choose([Offer(demand, 3)], 100)
    speeds = "expected speeds 1.00, 1.75, 2.13, 2.25 times plain decoding for K = 0 to 3"
    assert depth_reason(policy, demand, choice) == f"K = 3 of at most 3: {speeds}"
    fixed = DraftDemand(2, "the request's num_draft_tokens")
    reason = "K = 2 in every round: the request's num_draft_tokens"
    assert depth_reason(policy, fixed, policy.choose([Offer(fixed, 2)])) == reason


def test_a_depth_that_cannot_pay_is_tried_seldom() -> None:
    table, prior, by_depth = (1.0, 1.1, 1.2, 2.5), Prior(), [0] * 4
    policy, machine = RoundPolicy(CostTable(table)), Machine(DENSE_27B, table, 0)
    for _ in range(20):
        counted = machine.answer(policy, adaptive(prior=prior))
        by_depth = [a + b for a, b in zip(by_depth, counted, strict=True)]
    assert 0 < by_depth[3] < 0.04 * sum(by_depth)
    assert by_depth[2] > 0.9 * sum(by_depth)


@pytest.mark.parametrize("best", [0, 1])
def test_a_depth_that_became_cheaper_is_chosen_again(best: int) -> None:
    """The machine was busy when it was measured; rounds at the chosen depth cannot show that."""
    policy, table = RoundPolicy(), (1.0, 1.3, 1.9)
    for k, seconds in enumerate(table):
        measure(policy.costs, k, 3 * seconds if k == best else seconds)
    acceptance = (0.7, 0.4) if best else (0.1, 0.1)
    machine, prior, by_depth = Machine(acceptance, table, 0), Prior([90.0] * 2, [60.0, 40.0]), [0]
    for _ in range(10):
        by_depth = machine.answer(policy, adaptive(2, 2, prior))
    assert by_depth[best] > 0.8 * sum(by_depth)


def test_a_trial_ends_after_rounds_of_its_own_depth_only() -> None:
    """Results of rounds that began before the trial arrive during it."""
    policy, demand = RoundPolicy(CostTable([1.0, 1.1, 2.5])), adaptive(2, 1)
    while (tried := chosen(policy, demand)) == 1:
        policy.learn(1, 100, 1, 1, 1.1)
    for _ in range(TRIAL_ROUNDS):
        policy.learn(1, 100, 1, 1, 1.1)
        assert chosen(policy, demand) == tried != 1
    for _ in range(TRIAL_ROUNDS if tried else PLAIN_TRIAL_ROUNDS):
        assert chosen(policy, demand) == tried
        policy.learn(1, 100, tried, tried, 5.0)
    assert chosen(policy, demand) == 1


def test_a_parked_drafter_returns_when_the_text_becomes_predictable() -> None:
    parked, by_depth = [0] * 4, [0] * 3
    for seed in range(12):
        policy, demand = RoundPolicy(CostTable(M5_MOE)), adaptive(2, 2)
        counted = Machine(UNPREDICTABLE, M5_MOE, seed).answer(policy, demand, 1000)
        parked = [a + b for a, b in zip(parked, counted, strict=True)]
        counted = Machine((0.95, 0.95), M5_MOE[:3], seed).answer(policy, demand, 1000)
        by_depth = [a + b for a, b in zip(by_depth, counted, strict=True)]
    assert parked[0] > 0.75 * sum(parked)  # a first draft loses 3 % there
    assert by_depth[2] > 0.6 * sum(by_depth)


def test_until_anything_is_known_it_drafts_the_default() -> None:
    assert chosen(RoundPolicy(), adaptive(3, 2)) == 2


def test_without_a_probe_it_measures_every_depth_before_it_settles() -> None:
    """It once stayed at its ceiling for ever: with one depth unknown nothing was compared."""
    policy, demand = RoundPolicy(), adaptive(3, 3)
    machine = Machine(UNPREDICTABLE, SLOW_VERIFY, 0)
    _ = machine.answer(policy, demand)
    by_depth = machine.answer(policy, demand, 2000)
    assert by_depth[0] > 0.93 * sum(by_depth)


def test_what_other_answers_showed_decides_the_first_round() -> None:
    prior = Prior([100.0, 30.0], [30.0, 6.0])
    assert chosen(RoundPolicy(CostTable(SLOW_VERIFY)), adaptive(2, 2, prior)) == 0
    prior = Prior([100.0, 90.0], [95.0, 85.0])
    assert chosen(RoundPolicy(CostTable(M5_DENSE)), adaptive(2, 1, prior)) == 2


def test_a_policy_that_does_not_follow_the_clock_chooses_the_same_whatever_it_says() -> None:
    ways = set[tuple[int, ...]]()
    for seed in range(3):
        policy = RoundPolicy(CostTable(M5_MOE), follows_clock=False)
        demand, draw, ks = adaptive(), random.Random(seed), list[int]()
        for turn in range(300):
            ks.append(chosen(policy, demand))
            policy.learn(1, 100, ks[-1], ks[-1], draw.choice((1e-4, 1.0, 30.0)))
            assert demand.acceptance is not None
            demand.acceptance.add(ks[-1], turn % 3)
        ways.add(tuple(ks))
    (way,) = ways
    assert len(set(way)) > 1


def test_a_draft_that_was_never_observed_is_assumed_to_be_accepted_less_often() -> None:
    shares = Acceptance(4, Prior([90.0] * 2, [81.0, 72.0])).shares
    assert shares == pytest.approx([0.9, 0.8, 0.72, 0.648])


# Seven shares and costs, by which a larger ceiling pays or does not.
DEEP = {
    "pays": ((0.95,) * 7, tuple(1 + 0.1 * k for k in range(8)), 1.2),
    "does not": ((0.72, 0.55, 0.4, 0.3, 0.2, 0.2, 0.2), tuple(1 + 0.3 * k for k in range(8)), 0.98),
    "hardly": ((0.86, 0.76, 0.74, 0.72, 0.7, 0.7, 0.7), (*M5_DENSE, 1.8, 2.1, 2.3, 2.6), 0.98),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_ceiling_of_seven_pays_where_it_can_and_costs_little_where_not(name: str) -> None:
    """Paired with a ceiling of three, from the first answer of a model on."""
    acceptance, table, least = DEEP[name]
    ratios = list[float]()
    for seed in range(6):
        rates = list[float]()
        for most in (3, 7):
            prior, policy = Prior(), RoundPolicy(CostTable(table[: most + 1]))
            machine = Machine(acceptance, table[: most + 1], seed)
            for _ in range(4):
                _ = machine.answer(policy, adaptive(most, prior=prior))
            rates.append(machine.expected_rate())
        ratios.append(rates[1] / rates[0])
    assert sum(ratios) / len(ratios) >= least, ratios


def test_an_answer_may_begin_without_what_others_showed_and_shows_them_its_own() -> None:
    prior = Prior([90.0], [1.0])
    own, others = Acceptance(1, prior, is_own=True), Acceptance(1, prior)
    assert own.shares == [0.5] and others.shares[0] < 0.02 and not own.is_known
    own.add(1, 1)
    assert prior.hits[0] > 1.9


@pytest.mark.parametrize("disturbed", range(4))
def test_no_depth_is_expected_to_give_more_than_its_tokens(disturbed: int) -> None:
    """A probe on a busy machine said that K = 2 is 6.99 times as fast as plain decoding."""
    table = [1.0, 1.1, 1.2, 1.3]
    table[disturbed] *= 7
    policy, demand = RoundPolicy(CostTable(table)), sure_of([0.9] * 3)
    reason = depth_reason(policy, demand, policy.choose([Offer(demand, 3)], 100))
    listed = reason.partition("speeds ")[2].partition(" times")[0]
    assert all(float(speed) <= k + 1 for k, speed in enumerate(listed.split(", "))), listed
    assert policy.speedup(demand) <= 4


def test_a_disturbed_plain_step_does_not_make_the_deepest_draft_look_best() -> None:
    policy = RoundPolicy(CostTable([7.0, 1.1, 5.0, 5.2]))
    assert chosen(policy, sure_of([0.5] * 3)) == 1


@pytest.mark.parametrize("disturbed", [0.1, 1.0, 10.0])
def test_drafted_rounds_show_a_plain_step_although_the_probe_was_disturbed(
    disturbed: float,
) -> None:
    policy = RoundPolicy(CostTable([disturbed * cost for cost in M5_DENSE]))
    measure(policy.costs, 2, M5_DENSE[2])
    demand = adaptive()
    assert policy.plain_seconds(demand) is None
    demand.rounds = ENOUGH
    assert policy.plain_seconds(demand) == pytest.approx(M5_DENSE[0])


def test_the_speedup_is_that_of_the_best_depth() -> None:
    assert RoundPolicy(CostTable(M5_DENSE)).speedup(adaptive()) == 0.0
    always = sure_of([1.0] * 3)
    assert RoundPolicy(CostTable([9.0, 1.0, 1.0, 1.0])).speedup(always) == 4.0
    assert RoundPolicy(CostTable([1.0, 9.0, 9.0, 9.0])).speedup(always) == 1.0
    assert RoundPolicy().speedup(always) == 0.0


# ---------------------------------------------------------------- several requests


def played(
    policy: RoundPolicy,
    offers: Sequence[Offer],
    seconds: Callable[[int], float],
    rounds: int,
    unread: int = 0,
) -> list[int]:
    """The K of rounds that take `seconds` of it."""
    ks = list[int]()
    for _ in range(rounds):
        ks.append(policy.choose(offers, unread=unread).k)
        policy.learn(len(offers), 0, ks[-1], ks[-1], seconds(ks[-1]))
    return ks


def several(size: int, acceptance: Sequence[float], most: int = 3) -> list[Offer]:
    return [Offer(sure_of(acceptance), most)] * size


@pytest.mark.parametrize(
    ("acceptance", "each", "best"),
    [(SURE, 0.05, 3), (POOR, 0.3, 0), (SURE, 1.5, 0), (POOR, 0.05, 1)],
    ids=["drafts pay", "they are wrong", "they cost too much", "the first one pays"],
)
def test_the_best_k_of_several_is_found_from_what_rounds_took(
    acceptance: Sequence[float], each: float, best: int
) -> None:
    """A round of k drafts takes 1 + k * each."""
    ks = played(RoundPolicy(), several(4, acceptance), lambda k: 1 + k * each, 400)
    assert ks.count(best) > 0.8 * len(ks)
    assert len(set(ks)) > 1  # its neighbours are looked at


def test_several_climb_while_drafts_pay_and_try_nothing_dear_beyond() -> None:
    paying = played(RoundPolicy(), several(2, SURE, 2), lambda k: 1.0, 3 * TRIAL_ROUNDS)
    assert set(paying) == {0, 1, 2} and paying.count(0) == ENOUGH
    assert set(played(RoundPolicy(), several(2, POOR), lambda k: 1 + 3 * k, 400)) == {0, 1}


def test_another_size_begins_where_the_nearest_one_is() -> None:
    policy = RoundPolicy()
    _ = played(policy, several(16, SURE), lambda k: 1 + 0.05 * k, 60)
    assert policy.choose(several(8, SURE)).k == 3


@pytest.mark.parametrize("quicker", [0, 2])
def test_a_neighbour_on_either_side_that_became_quicker_is_chosen(quicker: int) -> None:
    """Rounds at the chosen K take as long as before, so only a trial can show it."""
    policy, offers, seconds = RoundPolicy(), several(8, SURE, 2), [1.0, 1.0, 1.9]
    assert played(policy, offers, seconds.__getitem__, TRIAL_EVERY)[-1] == 1
    seconds[quicker] = 0.3
    assert quicker in played(policy, offers, seconds.__getitem__, 16 * TRIAL_EVERY)[-2:]


def test_a_request_with_a_k_of_its_own_gets_it() -> None:
    fixed, none = DraftDemand(3), DraftDemand(0)
    offers = [Offer(fixed, 3), *several(1, POOR), Offer(none, 0)]
    assert set(played(RoundPolicy(), offers, lambda k: 1 + 9 * k, 400)) == {3}
    assert set(played(RoundPolicy(), [Offer(none, 0)] * 3, lambda k: 1.0, 10)) == {0}
    # One of eight drafts well, and a draft doubles everybody's step.
    few = [*several(1, SURE), *[Offer(none, 0)] * 7]
    ks = played(RoundPolicy(), few, lambda k: 1 + k, 400)
    assert ks.count(0) > 0.9 * len(ks)


def test_rounds_that_requests_share_have_a_limited_number_of_rows() -> None:
    policy = RoundPolicy()
    assert [policy.most_drafts(size) for size in (2, 8, 9, 16)] == [31, 7, 6, 3]
    policy.shared_depth = 4
    assert [policy.most_drafts(size) for size in (2, 8, 9, 16)] == [4, 4, 4, 3]


def test_rounds_that_requests_share_have_the_rows_that_were_probed_and_have_memory() -> None:
    policy = RoundPolicy()
    policy.probed_rows, policy.room_rows = 48, 35
    assert [policy.most_drafts(size) for size in (1, 2, 8, 16, 40)] == [64, 16, 3, 1, 0]
    policy.room_rows = 1 << 30
    assert [policy.most_drafts(size) for size in (1, 2, 8, 16, 40)] == [64, 23, 5, 2, 0]


@pytest.mark.parametrize(
    ("room", "reason"),
    [(64, ""), (16, ""), (15, "memory for the states of 15 rows"), (3, "K = 0 for 4 requests")],
)
def test_a_depth_for_which_there_is_no_memory_is_not_chosen_and_says_why(
    room: int, reason: str
) -> None:
    policy = RoundPolicy()
    policy.shared_depth, policy.room_rows = 3, room
    offers = several(4, SURE, policy.most_drafts(4))
    ks = played(policy, offers, lambda k: 1 + 0.05 * k, 100)
    assert max(ks) == statistics.mode(ks) == min(3, max(0, room // 4 - 1))
    text = depth_reason(policy, offers[0].demand, policy.choose(offers))
    assert reason in text
    assert ("memory" in text) == bool(reason)


def test_a_head_that_must_read_many_rows_first_is_woken_only_where_that_pays() -> None:
    policy, offers = RoundPolicy(), several(4, SURE, 1)
    assert played(policy, offers, lambda k: 1 + 2 * k, 40)[-1] == 0
    for _ in range(2):
        policy.record_wake(100, 10.0)
    policy.costs.begin_trial(Form.of(4, 0, 1, 1))
    for _ in range(2):
        measure(policy.costs, 1, 1.1, 4)  # now a draft costs little more than its rows
    assert policy.choose(offers, unread=50_000).k == 0
    assert policy.choose(offers, unread=10).k == 1


def test_a_wake_that_compiled_does_not_let_the_head_rest_for_ever() -> None:
    policy, offers = RoundPolicy(), several(8, SURE, 1)
    assert played(policy, offers, lambda k: 1 + 0.1 * k, 40)[-1] == 1
    for seconds in (60.0, 0.1, 60.0):
        policy.record_wake(100, seconds)
        assert policy.choose(offers, unread=200).k == 1, seconds


@pytest.mark.parametrize("unread", [0, 1000])
def test_trials_of_what_does_not_pay_take_a_small_share_of_the_time(unread: int) -> None:
    """The head's reading before them is a part of the cost."""
    policy, offers = RoundPolicy(), several(8, POOR)
    _ = played(policy, offers, lambda k: 1 + 3 * k, 3 * TRIAL_ROUNDS)
    for _ in range(2):
        policy.record_wake(100, 1.0)
    ks = played(policy, offers, lambda k: 1 + 3 * k, 40 * TRIAL_EVERY, unread)
    drafted = len(ks) - ks.count(0)
    assert 0 < drafted <= 3 * TRIAL_ROUNDS
    lost = drafted * (4 - 1.2) + drafted / TRIAL_ROUNDS * unread * 0.01
    assert lost <= 0.02 * len(ks)
