"""Requests copy where all of those that share the round gain by it."""

import random
from collections.abc import Sequence

import pytest

from exo_node.mtp.drafting.acceptance import FIRST_CHANCES, Acceptance, CopyEvidence, Prior
from exo_node.mtp.drafting.costs import ENOUGH, CostTable, Form
from exo_node.mtp.drafting.lookup import Resumed
from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.drafting.round_policy import DraftDemand, Offer, RoundPolicy
from exo_node.mtp.types import MAX_ROUND_ROWS

SURE = [0.97**n for n in range(1, 16)]
POOR = [0.3**n for n in range(1, 16)]
NO: list[float] = []
HEAD = DraftDemand(3, "", Acceptance(3, Prior([90.0] * 3, [72.0, 63.0, 54.0])), 3)
NO_HEAD = DraftDemand()
CHEAP = {(size, length): 1 + length * 0.05 for size in (3, 16) for length in (3, 7, 15)}
DEAR = {cell: 1 + cell[1] * 0.5 for cell in CHEAP}
Chosen = tuple[int, int, list[bool]]


def measure(costs: CostTable, form: Form, seconds: float) -> None:
    for _ in range(ENOUGH):
        costs.add(form, seconds)


def policy(
    ratios: dict[tuple[int, int], float],
    size: int,
    in_place: int = 3,
    *,
    head_s: float = 0.0,
) -> RoundPolicy:
    """Plain rounds take 1 s, rounds of 3 drafts of the head `head_s`."""
    decider = RoundPolicy()
    decider.allow_shared(sorted({length for _, length in ratios}), ratios, in_place)
    measure(decider.costs, Form.of(size, 0, 0, 0), 1.0)
    if head_s:
        for k, share in enumerate((0.4, 0.7, 1.0), 1):
            measure(decider.costs, Form.of(size, 0, k, k), 1 + share * (head_s - 1))
    return decider


def chosen(decider: RoundPolicy, demand: DraftDemand, *reached: Sequence[float]) -> Chosen:
    offers = [Offer(demand, demand.most, each) for each in reached]
    width, head, is_copied, *_ = decider.choose(offers)
    return width, head, list(is_copied)


@pytest.mark.parametrize(
    ("reached", "ratios", "choice"),
    [
        ((NO, NO, NO), CHEAP, (0, 0, [False, False, False])),
        ((POOR, NO, NO), CHEAP, (0, 0, [False, False, False])),
        ((SURE, NO, NO), CHEAP, (15, 0, [True, False, False])),
        # The same copy does not pay for the padding of two others where rows are dear.
        ((SURE, NO, NO), DEAR, (0, 0, [False, False, False])),
        ((SURE, SURE, SURE), DEAR, (7, 0, [True, True, True])),
        ((SURE, POOR, NO), CHEAP, (15, 0, [True, True, False])),
        ((SURE[:3], NO, NO), CHEAP, (3, 0, [True, False, False])),
    ],
    ids=["prose", "chance", "one pays", "one does not pay", "all pay", "ragged", "the last tokens"],
)
def test_a_wider_round_must_pay_for_everybodys_padding(
    reached: Sequence[Sequence[float]], ratios: dict[tuple[int, int], float], choice: Chosen
) -> None:
    assert chosen(policy(ratios, 3), NO_HEAD, *reached) == choice


def test_a_better_copy_takes_the_place_of_the_heads_drafts_at_the_same_width() -> None:
    decider = policy(DEAR, 3, head_s=1.3)
    assert chosen(decider, HEAD, SURE, POOR, NO) == (3, 3, [True, False, False])
    # Where rows of a batch are not exact, drafts of another kind could change an answer.
    decider = policy(DEAR, 3, 2, head_s=1.3)
    assert chosen(decider, HEAD, SURE, POOR, NO) == (3, 3, [False] * 3)


def test_the_head_drafts_on_for_the_others_in_a_wider_round() -> None:
    cheap_head, dear_head = policy(CHEAP, 3, head_s=1.1), policy(CHEAP, 3, head_s=1.5)
    assert chosen(cheap_head, HEAD, SURE, NO, NO) == (15, 3, [True, False, False])
    assert chosen(dear_head, HEAD, SURE, NO, NO) == (15, 0, [True, False, False])
    assert chosen(cheap_head, HEAD, SURE, SURE, SURE) == (15, 0, [True, True, True])


def test_a_named_k_is_kept_for_who_does_not_copy() -> None:
    decider = policy(CHEAP, 3, head_s=1.3)
    copying = [Offer(NO_HEAD, 0, SURE)] * 2
    choice = decider.choose([Offer(DraftDemand(2), 2), *copying])
    assert choice[:3] == (15, 2, [False, True, True])


@pytest.mark.parametrize(("size", "width"), [(2, 15), (4, 15), (5, 7), (8, 7), (9, 3), (16, 3)])
def test_a_round_has_few_rows_in_all(size: int, width: int) -> None:
    assert chosen(policy(CHEAP, size), NO_HEAD, *[SURE] * size)[0] == width
    assert size * (width + 1) <= MAX_ROUND_ROWS


@pytest.mark.parametrize(("room", "width"), [(64, 15), (48, 15), (47, 7), (12, 3), (11, 0)])
def test_copies_have_the_rows_for_which_there_is_memory(room: int, width: int) -> None:
    decider = policy(CHEAP, 3)
    decider.room_rows = room
    assert chosen(decider, NO_HEAD, *[SURE] * 3)[0] == width


def test_nothing_is_copied_before_plain_rounds_were_measured_or_copies_allowed() -> None:
    decider = RoundPolicy()
    measure(decider.costs, Form.of(2, 0, 0, 0), 1.0)
    assert chosen(decider, NO_HEAD, SURE, SURE)[0] == 0
    decider = RoundPolicy()
    decider.allow_shared([3], CHEAP)
    assert chosen(decider, NO_HEAD, SURE, SURE)[0] == 0
    measure(decider.costs, Form.of(2, 0, 0, 0), 1.0)
    assert chosen(decider, NO_HEAD, SURE, SURE)[0] == 3


def test_a_width_that_is_dearer_than_its_probe_is_left_and_looked_at_again() -> None:
    decider, widths, slow_rounds = policy({(3, 3): 1.1}, 3), list[int](), 1000
    for turn in range(3 * slow_rounds):
        offers = [Offer(NO_HEAD, 0, each) for each in (SURE, NO, NO)]
        width, head, *_ = decider.choose(offers)
        slow = 5.0 if turn < slow_rounds else 1.1
        decider.learn(3, 0, width, head, 3 * (slow if width else 1.0))
        widths.append(width)
    assert widths[:ENOUGH] == [3] * ENOUGH
    assert widths[:slow_rounds].count(3) <= 4 * ENOUGH
    assert set(widths[2 * slow_rounds :]) == {3}


def test_rounds_of_copies_leave_the_costs_of_the_heads_alone() -> None:
    decider = policy(CHEAP, 3, head_s=1.3)
    for _ in range(9):
        decider.learn(3, 0, 15, 3, 50.0)
        decider.learn(3, 0, 3, 0, 50.0)
    costs = decider.costs
    by_head = [costs.seconds(Form.of(3, 0, k, k)) for k in (3, 0, 15)]
    assert by_head == [1.3, 1.0, None]


# ---------------------------------------------------------------- one request

# In plain steps: the demo model on a CPU, with the product's own products of matrices and MLX's.
OURS = {3: 1.36, 7: 1.88, 15: 3.01}
MLX = {3: 2.1, 7: 3.5, 15: 5.9}
ROLLBACK = {3: 0.3, 7: 0.5, 15: 1.0}


class Copier:
    """One answer that may copy."""

    def __init__(
        self, ratios: dict[int, float] = OURS, evidence: CopyEvidence | None = None
    ) -> None:
        self.policy = RoundPolicy(CostTable([1.0]))
        self.policy.allow(list(ratios), ratios, ROLLBACK)
        self.evidence = (evidence or CopyEvidence()).of_answer(max(ratios))

    def copy(self, match_length: int, limit: int = 100, *, resumed: Resumed = 0) -> int:
        """Tokens that the next round copies."""
        return self.of(self.evidence.reached(match_length, limit, resumed=resumed))

    def of(self, reached: Sequence[float]) -> int:
        choice = self.policy.choose([Offer(NO_HEAD, 0, reached)], 50)
        return choice.width if choice.is_copied[0] else 0

    def taught(self, length: int, right: float, count: int = 60) -> "Copier":
        """After `count` tokens after matches of `length`: the share `right` were right."""
        for i in range(count):
            self.evidence.add(length, is_right=int((i + 1) * right) > int(i * right))
        return self


@pytest.mark.parametrize(
    ("ratios", "match_length", "length"),
    [
        (OURS, 3, 0),  # three tokens in common are no reason
        (OURS, 8, 7),
        (OURS, 16, 7),
        (OURS, 64, 7),  # longer copies follow when these stand
        (MLX, 5, 0),
        (MLX, 16, 7),
    ],
)
def test_the_first_copy_of_a_model(
    ratios: dict[int, float], match_length: int, length: int
) -> None:
    assert Copier(ratios).copy(match_length) == length


def test_a_model_that_continues_otherwise_is_not_offered_copies() -> None:
    assert Copier().taught(16, right=0.2).copy(16) == 0


def test_one_that_copies_from_three_tokens_on_is() -> None:
    copier = Copier()
    for length in (3, 4, 5, 8, 16):
        _ = copier.taught(length, right=1.0)
    assert copier.copy(3) == 15


@pytest.mark.parametrize("resumed", [1, 2])
@pytest.mark.parametrize(("right", "length"), [(False, 0), (True, 15)])
def test_after_a_change_its_own_evidence_decides(
    resumed: Resumed, right: bool, length: int
) -> None:
    copier = Copier().taught(64, right=1.0)
    for _ in range(20):
        copier.evidence.add(64, is_right=right, resumed=resumed)
        copier.evidence.add(64, is_right=not right, resumed=1 if resumed == 2 else 2)
    assert copier.copy(64, resumed=resumed) == length
    assert copier.copy(64) == 15


@pytest.mark.parametrize(("limit", "length"), [(0, 0), (2, 0), (3, 3), (6, 3), (14, 7), (15, 15)])
def test_only_measured_lengths_are_chosen(limit: int, length: int) -> None:
    assert Copier().taught(64, right=1.0).copy(64, limit) == length


def test_a_copy_must_beat_the_rounds_that_the_head_drafts() -> None:
    copier = Copier({7: 3.0}).taught(8, right=0.9)
    assert copier.copy(8) == 7
    copier.policy.costs.probe([1.0, 1.05, 1.1, 1.15])
    reached = copier.evidence.reached(8, 100)
    choice = copier.policy.choose([Offer(HEAD, 3, reached)], 50)
    assert choice[:3] == (3, 3, [False])


def test_measured_costs_replace_the_probed_ones() -> None:
    copier = Copier().taught(64, right=1.0)
    assert copier.copy(64) == 15
    measure(copier.policy.costs, Form.of(1, 50, 0, 0), 1.0)
    measure(copier.policy.costs, Form.of(1, 50, 15, 0), 20.0)
    assert copier.copy(64) == 7


def test_removing_rejected_rows_counts_as_often_as_it_is_due() -> None:
    copier = Copier({3: 2.0})
    copier.policy.allow([3], {3: 2.0}, {3: 8.0})
    assert copier.of([1.0] * 3) == 3  # 4 tokens in 2 steps
    assert copier.of([0.9] * 3) == 3  # 3.7 in 2.8
    assert copier.of([0.9, 0.8, 0.7]) == 0  # 3.4 in 4.4


def test_answers_begin_with_what_others_showed() -> None:
    evidence = CopyEvidence()
    assert evidence.shares == pytest.approx(FIRST_CHANCES)
    _ = Copier(evidence=evidence).taught(16, right=0.1)
    assert Copier(evidence=evidence).copy(16) == 0


@pytest.mark.parametrize("seed", range(3))
def test_prose_pays_nothing_and_a_copy_is_found_at_once(seed: int) -> None:
    """Words of a small vocabulary repeat each other by chance. Played by costs alone."""
    rng = random.Random(seed)
    prose = [rng.randrange(12) for _ in range(600)]
    evidence = CopyEvidence()
    rate, _ = played(prose[:100], prose[100:], Copier(evidence=evidence))
    assert rate > 0.98
    file = [rng.randrange(4000) for _ in range(400)]
    edited = [token if i % 64 != 40 else 5000 + i for i, token in enumerate(file)]
    rate, first = played(file, [*file[:3], *edited], Copier(evidence=evidence))
    assert rate > 2.5
    assert first < 30


def played(prompt: Sequence[int], answer: Sequence[int], copier: Copier) -> tuple[float, int]:
    """(Tokens per plain step, tokens before the first copy), at the costs OURS."""
    lookup, seconds, end, first = PromptLookup(prompt, copier.evidence), 0.0, 0, len(answer)
    while end < len(answer):
        _ = lookup.read()
        length = copier.of(lookup.reached(len(answer) - end - 1))
        copy = lookup.tokens(length) if length else []
        first = min(first, end) if copy else first
        stood = 0
        while stood < length and copy[stood] == answer[end + stood]:
            stood += 1
        took = OURS[length] if length else 1.0
        copier.policy.learn(1, 50, length, 0, took)
        for token in answer[end : end + stood + 1]:
            lookup.push(token)
        end += stood + 1
        seconds += took + (ROLLBACK[length] if stood < length else 0.0)
    return len(answer) / seconds, first
