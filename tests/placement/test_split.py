from itertools import product
from operator import mul

from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.placement.cost import ModelSizes
from exo_node.placement.search import (
    fill_fastest_first,
    fits_in_order,
    most_layers,
    proportional_layers,
)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=16), st.integers(0, 200))
def test_shares_sum_to_the_total_and_nobody_goes_without(weights: list[int], more: int) -> None:
    counts = proportional_layers(len(weights) + more, weights)
    assert sum(counts) == len(weights) + more
    assert min(counts) >= 1


@settings(deadline=None)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_filling_costs_the_least_and_stays_within_the_rooms(
    total: int, nodes: list[tuple[int, int]]
) -> None:
    costs, rooms = [cost for cost, _ in nodes], [room for _, room in nodes]
    ways = [way for way in product(*(range(1, room + 1) for room in rooms)) if sum(way) == total]
    counts = fill_fastest_first(total, costs, rooms)
    assert (counts is None) is (ways == [])
    if counts is not None:
        assert counts in ways
        assert sum(map(mul, counts, costs)) == min(sum(map(mul, way, costs)) for way in ways)


def test_the_most_layers_are_those_of_the_place_with_the_fewest_caches() -> None:
    # Layers 3 and 7 hold the caches.
    model = ModelSizes(8, 2, layer=100, cache=400, ends=70, head=0, head_cache=0)
    room = with_headroom(4 * 100 + 400)
    assert most_layers(model, room - 1, generator=False) == 3
    assert most_layers(model, room, generator=False) == 4
    assert most_layers(model, room, generator=True) == 3
    assert not fits_in_order(model, [room, room], [3, 5])  # layers 3 to 7 hold both caches
    assert fits_in_order(model, [room, with_headroom(500 + 2 * 400)], [3, 5])


def with_headroom(need: int) -> int:
    return -(-need * 12 // 10)
