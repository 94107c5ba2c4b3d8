"""A batch copies where all of its requests together gain by it."""

from collections.abc import Sequence

import pytest

from exo_node.mtp.drafting.batch_depth import DraftDemand
from exo_node.mtp.drafting.batch_lookup import (
    FORGET_AFTER,
    MAX_ROUND_ROWS,
    BatchPolicy,
    CopyPlan,
    Offer,
    sizes_of,
)
from exo_node.mtp.drafting.costs import ENOUGH

SURE = [0.97**n for n in range(1, 16)]
POOR = [0.3**n for n in range(1, 16)]
NO: list[float] = []
HEAD = DraftDemand(3, [0.8, 0.7, 0.6])
NO_HEAD = DraftDemand(0, ())
CHEAP = {(size, length): 1 + length * 0.05 for size in (3, 16) for length in (3, 7, 15)}
DEAR = {cell: 1 + cell[1] * 0.5 for cell in CHEAP}


def policy(
    ratios: dict[tuple[int, int], float],
    size: int,
    head: int = 0,
    in_place: int = 3,
    head_s: float = 1.3,
) -> BatchPolicy:
    """Plain rounds take 1 s, rounds of `head` drafts `head_s`."""
    decider = BatchPolicy()
    decider.allow([3, 7, 15], ratios, in_place)
    for k in {0, head}:
        for _ in range(ENOUGH):
            decider.depth.learn(size, k, head_s if k else 1.0)
    return decider


def offers(demand: DraftDemand, *reached: Sequence[float]) -> list[Offer]:
    return [Offer(demand, each) for each in reached]


@pytest.mark.parametrize(
    ("reached", "ratios", "choice"),
    [
        ((NO, NO, NO), CHEAP, CopyPlan(0, 0, [False, False, False])),
        ((POOR, NO, NO), CHEAP, CopyPlan(0, 0, [False, False, False])),
        ((SURE, NO, NO), CHEAP, CopyPlan(15, 0, [True, False, False])),
        # The same copy does not pay for the padding of two others where rows are dear.
        ((SURE, NO, NO), DEAR, CopyPlan(0, 0, [False, False, False])),
        ((SURE, SURE, SURE), DEAR, CopyPlan(7, 0, [True, True, True])),
        ((SURE, POOR, NO), CHEAP, CopyPlan(15, 0, [True, True, False])),
        ((SURE[:3], NO, NO), CHEAP, CopyPlan(3, 0, [True, False, False])),
    ],
    ids=["prose", "chance", "one pays", "one does not pay", "all pay", "ragged", "the last tokens"],
)
def test_a_wider_round_must_pay_for_everybodys_padding(
    reached: Sequence[Sequence[float]], ratios: dict[tuple[int, int], float], choice: CopyPlan
) -> None:
    assert policy(ratios, 3).choose(offers(NO_HEAD, *reached), 0) == choice


def test_a_better_copy_takes_the_place_of_the_heads_drafts_at_the_same_width() -> None:
    rows = offers(HEAD, SURE, POOR, [])
    assert policy(DEAR, 3, 3).choose(rows, 3) == CopyPlan(3, 3, [True, False, False])
    # Where rows of a batch are not exact, drafts of another kind could change an answer.
    assert policy(DEAR, 3, 3, in_place=2).choose(rows, 3) == CopyPlan(3, 3, [False] * 3)


def test_the_head_drafts_on_for_the_others_in_a_wider_round() -> None:
    rows = offers(HEAD, SURE, [], [])
    assert policy(CHEAP, 3, 3, head_s=1.1).choose(rows, 3) == CopyPlan(15, 3, [True, False, False])
    # A dear head rests meanwhile.
    assert policy(CHEAP, 3, 3, head_s=1.5).choose(rows, 3) == CopyPlan(15, 0, [True, False, False])


def test_where_all_copy_the_head_does_not_run() -> None:
    assert policy(CHEAP, 3, 3).choose(offers(HEAD, SURE, SURE, SURE), 3) == CopyPlan(
        15, 0, [True, True, True]
    )


def test_a_named_k_is_kept_for_who_does_not_copy() -> None:
    rows = [Offer(DraftDemand(2, None)), Offer(NO_HEAD, SURE), Offer(NO_HEAD, SURE)]
    choice = policy(CHEAP, 3, 2).choose(rows, 2)
    assert choice == CopyPlan(15, 2, [False, True, True])


@pytest.mark.parametrize(("size", "width"), [(2, 15), (4, 15), (5, 7), (8, 7), (9, 3), (16, 3)])
def test_a_round_has_few_rows_in_all(size: int, width: int) -> None:
    choice = policy(CHEAP, size).choose(offers(NO_HEAD, *[SURE] * size), 0)
    assert choice.width == width and size * (width + 1) <= MAX_ROUND_ROWS


def test_nothing_is_copied_before_plain_rounds_were_measured_or_copies_allowed() -> None:
    decider, rows = BatchPolicy(), offers(NO_HEAD, SURE, SURE)
    assert not decider.copies and decider.choose(rows, 0).width == 0
    decider.allow([3], CHEAP)
    assert decider.copies and decider.choose(rows, 0).width == 0
    for _ in range(ENOUGH):
        decider.depth.learn(2, 0, 1.0)
    assert decider.choose(rows, 0).width == 3


def test_a_width_that_is_dearer_than_its_probe_is_left_and_looked_at_again() -> None:
    decider, rows = policy({(3, 3): 1.1, (16, 3): 1.1}, 3), offers(NO_HEAD, SURE, [], [])
    chosen = list[int]()
    for turn in range(ENOUGH + 2 * FORGET_AFTER):
        choice = decider.choose(rows, 0)
        slow = turn < FORGET_AFTER
        decider.learn(3, choice, choice.width, (5.0 if slow else 1.1) if choice.width else 1.0)
        chosen.append(choice.width)
    assert chosen[:ENOUGH] == [3] * ENOUGH
    assert set(chosen[ENOUGH : ENOUGH + FORGET_AFTER - 1]) == {0}
    assert set(chosen[ENOUGH + FORGET_AFTER + 1 :]) == {3}


def test_rounds_of_copies_leave_the_costs_of_the_heads_alone() -> None:
    decider = policy(CHEAP, 3, 3)
    for _ in range(9):
        decider.learn(3, CopyPlan(15, 3, [True, False, False]), 15, 50.0)
        decider.learn(3, CopyPlan(3, 0, [True, True, True]), 3, 50.0)
    assert (decider.depth.seconds(3, 3), decider.depth.seconds(3, 0)) == (1.3, 1.0)
    assert decider.depth.seconds(3, 15) is None


@pytest.mark.parametrize(
    ("length", "sizes"), [(3, (3, 16)), (7, (3, 8)), (15, (3, 4)), (1, (3, 16)), (31, ())]
)
def test_few_and_as_many_as_fit_are_measured(length: int, sizes: tuple[int, ...]) -> None:
    assert sizes_of(length, 16) == sizes
