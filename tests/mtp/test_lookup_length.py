"""The lengths of copies, by evidence and measured costs."""

import random
from collections.abc import Sequence

import pytest
from forced_copies import FixedLength

from exo_node.mtp.drafting.costs import ENOUGH, RoundCosts
from exo_node.mtp.drafting.lookup import Resumed
from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.drafting.lookup_length import (
    ENOUGH_ROUNDS,
    FIRST_CHANCES,
    MARGIN,
    AdaptiveLength,
    CopyCosts,
    CopyEvidence,
)

# In plain steps: the demo model on a CPU, with the product's own products of matrices and MLX's.
OURS = {0: 1.0, 3: 1.36, 7: 1.88, 15: 3.01}
MLX = {0: 1.0, 3: 2.1, 7: 3.5, 15: 5.9}
ROLLBACK = {3: 0.3, 7: 0.5, 15: 1.0}


def policy(costs: dict[int, float] = OURS, evidence: CopyEvidence | None = None) -> AdaptiveLength:
    lengths = [length for length in costs if length]
    copy_costs = CopyCosts(RoundCosts(costs), ROLLBACK)
    return AdaptiveLength(lengths, copy_costs, evidence or CopyEvidence())


def taught(decider: AdaptiveLength, length: int, right: float, count: int = 60) -> AdaptiveLength:
    """After `count` tokens after matches of `length`, of which the share `right` were right."""
    for i in range(count):
        decider.observe(length, is_right=int((i + 1) * right) > int(i * right))
    return decider


@pytest.mark.parametrize(
    ("costs", "match_length", "length"),
    [
        (OURS, 3, 0),  # three tokens in common are no reason
        (OURS, 8, 7),
        (OURS, 16, 7),
        (OURS, 64, 7),  # longer copies follow when these stand
        (MLX, 5, 0),
        (MLX, 16, 7),
    ],
)
def test_the_first_copy_of_a_model(costs: dict[int, float], match_length: int, length: int) -> None:
    assert policy(costs).choose(match_length, 100, 50) == length


def test_a_model_that_continues_otherwise_is_not_offered_copies() -> None:
    assert taught(policy(), 16, right=0.2).choose(16, 100, 50) == 0


def test_one_that_copies_from_three_tokens_on_is() -> None:
    decider = policy()
    for length in (3, 4, 5, 8, 16):
        _ = taught(decider, length, right=1.0)
    assert decider.choose(3, 100, 50) == 15


@pytest.mark.parametrize("resumed", [1, 2])
@pytest.mark.parametrize(("right", "length"), [(False, 0), (True, 15)])
def test_after_a_change_its_own_evidence_decides(
    resumed: Resumed, right: bool, length: int
) -> None:
    decider = taught(policy(), 64, right=1.0)
    for _ in range(20):
        decider.observe(64, is_right=right, resumed=resumed)
        decider.observe(64, is_right=not right, resumed=1 if resumed == 2 else 2)
    assert decider.choose(64, 100, 50, resumed=resumed) == length
    assert decider.choose(64, 100, 50) == 15


@pytest.mark.parametrize(("limit", "length"), [(0, 0), (2, 0), (3, 3), (6, 3), (14, 7), (15, 15)])
def test_only_measured_lengths_are_chosen(limit: int, length: int) -> None:
    assert taught(policy(), 64, right=1.0).choose(64, limit, 50) == length


def test_a_copy_must_beat_the_rounds_that_the_head_drafts() -> None:
    decider = taught(policy({0: 1.0, 7: 3.0}), 8, right=0.9)
    assert decider.choose(8, 100, 50) == 7
    for _ in range(ENOUGH_ROUNDS):
        decider.learn_other(3, 7, 50, 2.6)
    assert decider.choose(8, 100, 50) == 0


def test_the_speed_without_copies_is_the_latest() -> None:
    decider = taught(policy(), 64, right=1.0)
    for _ in range(40):
        decider.learn_other(3, 4, 50, 0.5)
    assert decider.choose(64, 100, 50) == 0
    for _ in range(40):
        decider.learn_other(3, 1, 50, 1.5)
    assert decider.choose(64, 100, 50) == 15


def test_measured_costs_replace_the_probed_ones() -> None:
    decider = taught(policy(), 64, right=1.0)
    assert decider.choose(64, 100, 50) == 15
    for _ in range(ENOUGH):
        decider.learn_other(0, 1, 50, 1.0)
        decider.learn_copy(15, 50, 20.0)
    assert decider.choose(64, 100, 50) == 7


def test_removing_rejected_rows_counts_as_often_as_it_is_due() -> None:
    costs = CopyCosts(RoundCosts({0: 1.0, 3: 2.0}), {3: 8.0})
    assert costs.seconds(50, 3, 1.0) == 2.0
    assert costs.seconds(50, 3, 0.5) == 6.0
    assert costs.seconds(50, 7, 0.5) is None


def test_nothing_is_copied_before_anything_is_measured() -> None:
    costs = CopyCosts(RoundCosts(), {})
    assert AdaptiveLength([3], costs, CopyEvidence()).choose(64, 100, 50) == 0


def test_answers_begin_with_what_others_showed() -> None:
    evidence = CopyEvidence()
    assert evidence.shares == pytest.approx(FIRST_CHANCES)
    _ = taught(policy(evidence=evidence), 16, right=0.1)
    assert policy(evidence=evidence).choose(16, 100, 50) == 0


@pytest.mark.parametrize("seed", range(3))
def test_prose_pays_nothing_and_a_copy_is_found_at_once(seed: int) -> None:
    """Words of a small vocabulary repeat each other by chance. Played by costs alone."""
    rng = random.Random(seed)
    prose = [rng.randrange(12) for _ in range(600)]
    evidence = CopyEvidence()
    rate, _ = played(prose[:100], prose[100:], policy(evidence=evidence))
    assert rate > 0.98
    file = [rng.randrange(4000) for _ in range(400)]
    edited = [token if i % 64 != 40 else 5000 + i for i, token in enumerate(file)]
    rate, first = played(file, [*file[:3], *edited], policy(evidence=evidence))
    assert rate > 2.5
    assert first < 30


def played(
    prompt: Sequence[int], answer: Sequence[int], decider: AdaptiveLength
) -> tuple[float, int]:
    """(Tokens per plain step, tokens before the first copy), at the costs OURS."""
    lookup, seconds, end, first = PromptLookup(prompt, decider), 0.0, 0, len(answer)
    while end < len(answer):
        length = lookup.length(len(answer) - end - 1, len(prompt) + end)
        copy = lookup.tokens(length) if length else []
        first = min(first, end) if copy else first
        stood = 0
        while stood < length and copy[stood] == answer[end + stood]:
            stood += 1
        took = OURS[length] + (ROLLBACK[length] if stood < length else 0.0)
        position = len(prompt) + end
        if length:
            decider.learn_copy(length, position, OURS[length])
        else:
            decider.learn_other(0, 1, position, took)
        for token in answer[end : end + stood + 1]:
            lookup.push(token)
        end, seconds = end + stood + 1, seconds + took
    return len(answer) / seconds, first


def test_a_fixed_length_is_all_or_nothing() -> None:
    assert FixedLength(7).choose(3, 7, 0) == 7
    assert FixedLength(7).choose(3, 6, 0) == 0
    assert MARGIN > 1
