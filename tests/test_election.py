"""The head is the lowest live id, and the term counts the heads."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_node.node.election import Election, LowestIdElection
from exo_node.placement.ids import NodeId

LIVE_SETS = st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=20)


def run(election: Election, live_sets: Sequence[str]) -> list[tuple[str, int]]:
    return [
        (election.head([NodeId(node) for node in live]), int(election.term)) for live in live_sets
    ]


@pytest.mark.parametrize(
    ("live_sets", "expected"),
    [
        (["b"], [("b", 1)]),
        (["b", "b", "b"], [("b", 1), ("b", 1), ("b", 1)]),
        (["b", "bc", "cb"], [("b", 1), ("b", 1), ("b", 1)]),
        (["b", "ba"], [("b", 1), ("a", 2)]),
        (["ab", "b", "ab"], [("a", 1), ("b", 2), ("a", 3)]),
    ],
    ids=[
        "a node alone leads itself",
        "a head that stays keeps its term",
        "a higher id that joins changes nothing, in any order",
        "a lower id that joins takes over",
        "a head that is lost is replaced, and its return is a term of its own",
    ],
)
def test_head_and_term(live_sets: list[str], expected: list[tuple[str, int]]) -> None:
    assert run(LowestIdElection(), live_sets) == expected


@given(LIVE_SETS)
def test_all_that_see_the_same_members_name_the_same_head(live_sets: list[set[str]]) -> None:
    forward = run(LowestIdElection(), ["".join(sorted(live)) for live in live_sets])
    backward = run(LowestIdElection(), ["".join(sorted(live)[::-1]) for live in live_sets])
    assert forward == backward


@given(LIVE_SETS)
def test_a_term_has_one_head_and_never_falls(live_sets: list[set[str]]) -> None:
    history = run(LowestIdElection(), ["".join(sorted(live)) for live in live_sets])
    assert len({term for _, term in history}) == len(set(history))
    assert [term for _, term in history] == sorted(term for _, term in history)
