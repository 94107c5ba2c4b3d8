"""How much the search for pipelines weighs, in steps: time is the bench's business."""

import random
from dataclasses import replace
from itertools import pairwise

from exo_node.placement.cost import ModelSizes
from exo_node.placement.search import MAX_NODES, Problem, search

EVERY_STEP = 16 * 2**15 - 2**16 + 1
"""Ends of paths in all sets of 2 to 16 nodes: a set of k has k - 1."""


def problem(seed: int, room: int, size: int = 16) -> Problem:
    """Nodes of `room` layers each, their speeds and links at random, around 64 layers."""
    rng = random.Random(seed)
    return Problem(
        sizes=ModelSizes(64, 64, layer=10, cache=0, ends=0, head=0, head_cache=0),
        memory=[12 * room] * size,
        layer=sorted(rng.randint(10**6, 10**7) for _ in range(size)),
        tail=[rng.randint(10**6, 10**7) for _ in range(size)],
        hop=[
            [rng.randint(10**5, 10**7) if i != j else 0 for j in range(size)] for i in range(size)
        ],
        least=2,
        most=size,
    )


def test_sixteen_nodes_take_no_more_steps_than_held_and_karp() -> None:
    outcome = search(problem(1, room=4))  # all sixteen are needed
    assert len(outcome.routes[0].nodes) == 16
    assert 0 < outcome.relaxations <= EVERY_STEP


def test_what_cannot_win_is_not_followed() -> None:
    free = search(problem(2, room=16))
    assert free.relaxations < EVERY_STEP / 4
    best = free.routes[0].cost
    beaten = search(problem(2, room=16), known=[best // 2, best // 2])
    assert (beaten.routes, beaten.relaxations) == ((), 0)


def test_of_links_that_differ_by_direction_the_ring_goes_round_the_quick_way() -> None:
    uphill = [[0, 1, 9, 9], [9, 0, 1, 9], [9, 9, 0, 1], [1, 9, 9, 0]]
    for hop in (uphill, [list(column) for column in zip(*uphill, strict=True)]):
        asked = replace(problem(3, room=16, size=4), hop=hop, least=4, tail=[5, 0, 5, 5])
        [route] = search(asked).routes
        assert route.nodes[0] == 1
        ring = [*route.nodes, route.nodes[0]]
        assert [hop[i][j] for i, j in pairwise(ring)] == [1, 1, 1, 1]


def test_of_more_nodes_than_are_weighed_the_least_of_the_rest_is_told() -> None:
    outcome = search(problem(4, room=5, size=40))
    assert len(outcome.routes) == 2
    assert len(outcome.routes[0].nodes) <= MAX_NODES
    assert 0 < outcome.floor <= outcome.routes[0].cost
