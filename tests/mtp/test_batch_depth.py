"""A batch's K is the one with the most tokens for its measured seconds."""

from collections.abc import Callable

import pytest

from exo_node.mtp.drafting.batch_depth import LOOK_EVERY, BatchDepth, DraftDemand, size_bucket
from exo_node.mtp.drafting.costs import ENOUGH

SURE = [0.95, 0.9, 0.85]
POOR = [0.2, 0.1, 0.1]


def settled(
    wishes: list[DraftDemand], seconds: Callable[[int], float], rounds: int = 400
) -> list[int]:
    depth, chosen = BatchDepth(), list[int]()
    for _ in range(rounds):
        k = depth.choose(wishes)
        depth.learn(len(wishes), k, seconds(k))
        chosen.append(k)
    return chosen


def most(chosen: list[int]) -> int:
    late = chosen[100:]
    return max(set(late), key=late.count)


@pytest.mark.parametrize(
    ("acceptance", "each", "best"),
    [(SURE, 0.05, 3), (POOR, 0.3, 0), (SURE, 1.5, 0), (POOR, 0.05, 1)],
    ids=["drafts pay", "they are wrong", "they cost too much", "the first one pays"],
)
def test_the_best_k_is_found_from_what_rounds_took(
    acceptance: list[float], each: float, best: int
) -> None:
    """A round of k drafts takes 1 + k * each."""
    wishes = [DraftDemand(3, acceptance)] * 4
    chosen = settled(wishes, lambda k: 1 + k * each)
    assert most(chosen) == best
    assert chosen.count(best) > 0.8 * len(chosen)
    assert len(set(chosen)) > 1  # its neighbours are looked at


def test_the_text_compares_the_depths_that_were_measured() -> None:
    depth, wishes = BatchDepth(), [DraftDemand(3, SURE)] * 4
    assert depth.choose(wishes) == 0
    assert depth.reason() == (
        "K = 0 for 4 requests together, until enough is measured to choose by speed"
    )
    assert settled_in(depth, wishes, lambda k: 1 + k, 3 * ENOUGH) == 0
    assert depth.reason() == (
        "K = 0 for 4 requests together: expected speeds 1.00, 0.97 times plain decoding for "
        "K = 0 to 1"
    )


def test_it_climbs_while_drafts_pay_and_tries_nothing_dear_beyond() -> None:
    paying = settled([DraftDemand(2, SURE)] * 2, lambda k: 1.0, 3 * ENOUGH)
    assert set(paying) == {0, 1, 2} and paying.count(0) == ENOUGH
    losing = settled([DraftDemand(3, POOR)] * 2, lambda k: 1 + 3 * k)
    assert set(losing) == {0, 1}


def test_another_size_begins_where_the_nearest_one_is() -> None:
    depth, many = BatchDepth(), [DraftDemand(3, SURE)] * 16
    for _ in range(100):
        k = depth.choose(many)
        depth.learn(16, k, 1 + 0.05 * k)
    assert depth.choose(many[:8]) == 3


def test_costs_that_change_change_the_choice() -> None:
    depth, wishes = BatchDepth(), [DraftDemand(1, SURE)] * 8
    for cost, best in ((0.1, 1), (3.0, 0), (0.1, 1)):
        late = list[int]()
        for turn in range(12 * LOOK_EVERY):
            k = depth.choose(wishes)
            depth.learn(8, k, 1 + k * cost)
            if turn > 8 * LOOK_EVERY:
                late.append(k)
        assert max(set(late), key=late.count) == best


@pytest.mark.parametrize("quicker", [0, 2])
def test_a_neighbour_on_either_side_that_became_quicker_is_chosen(quicker: int) -> None:
    """Rounds at the chosen K take as long as before, so only a look can show it."""
    depth, wishes, seconds = BatchDepth(), [DraftDemand(2, SURE)] * 8, [1.0, 1.0, 1.9]
    assert settled_in(depth, wishes, seconds.__getitem__, LOOK_EVERY) == 1
    seconds[quicker] = 0.3
    assert settled_in(depth, wishes, seconds.__getitem__, 6 * LOOK_EVERY) == quicker


def test_a_request_with_a_k_of_its_own_gets_it() -> None:
    wishes = [DraftDemand(3, None), DraftDemand(3, POOR), DraftDemand(0, None)]
    assert set(settled(wishes, lambda k: 1 + 9 * k)) == {3}


def test_who_never_drafts_counts_and_wants_none() -> None:
    assert set(settled([DraftDemand(0, None)] * 3, lambda k: 1.0, 10)) == {0}
    # One of eight drafts well, and a draft doubles everybody's step.
    few = [DraftDemand(3, SURE), *[DraftDemand(0, SURE)] * 7]
    assert most(settled(few, lambda k: 1 + k)) == 0


def test_sizes_share_a_bucket_where_costs_are_alike() -> None:
    assert [size_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 3, 4, 5, 5, 6, 6, 7]


def test_a_head_that_must_read_many_rows_first_is_woken_only_where_that_pays() -> None:
    depth, wishes = BatchDepth(), [DraftDemand(1, SURE)] * 4
    assert settled_in(depth, wishes, lambda k: 1 + 2 * k, 40) == 0
    depth.record_wake(100, 10.0)
    for _ in range(ENOUGH):  # now a draft costs little more than its rows
        depth.learn(4, 1, 1.1)
    assert depth.choose(wishes, unread=50_000) == 0
    for _ in range(15):
        depth.learn(4, 1, 1.1)
    assert depth.choose(wishes, unread=50_000) == 0
    assert depth.choose(wishes, unread=10) == 1


def settled_in(
    depth: BatchDepth, wishes: list[DraftDemand], seconds: Callable[[int], float], rounds: int
) -> int:
    k = 0
    for _ in range(rounds):
        k = depth.choose(wishes)
        depth.learn(len(wishes), k, seconds(k))
    return k


@pytest.mark.parametrize("unread", [0, 1000])
def test_looks_at_what_does_not_pay_take_a_small_share_of_the_time(unread: int) -> None:
    """The head's reading before them is a part of the cost."""
    depth, wishes = BatchDepth(), [DraftDemand(3, POOR)] * 8
    _ = settled_in(depth, wishes, lambda k: 1 + 3 * k, 3 * ENOUGH)
    depth.record_wake(100, 1.0)
    plain, lost, woken = 0, 0.0, 0
    for _ in range(20 * LOOK_EVERY):
        k = depth.choose(wishes, unread)
        depth.learn(8, k, 1 + 3 * k)
        plain += k == 0
        lost += 4 - 1.2 if k else 0
        woken += k > 0
    assert 0 < woken <= 5 * ENOUGH
    assert lost + woken / ENOUGH * unread * 0.01 <= 0.03 * plain + unread * 0.01


def test_a_disturbed_plain_round_promises_no_more_than_the_drafts_can_give() -> None:
    depth, wishes = BatchDepth(), [DraftDemand(1, SURE)] * 4
    for k, seconds in ((0, 9.0), (1, 1.0)):
        for _ in range(ENOUGH):
            depth.learn(4, k, seconds)
    _ = depth.choose(wishes)
    speed = float(depth.reason().partition("1.00, ")[2].partition(" ")[0])
    assert 1 < speed <= 2
