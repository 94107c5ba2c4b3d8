import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.placement.split import proportional_layers


# exo's own cases (src/exo/master/tests), with fractions as whole numbers.
@pytest.mark.parametrize(
    ("total", "weights", "layers"),
    [
        (12, [1, 1, 1, 1], [3, 3, 3, 3]),
        (12, [1, 1, 2], [3, 3, 6]),
        (20, [9750, 125, 125], [18, 1, 1]),
        (10, [1], [10]),
        (3, [33, 33, 34], [1, 1, 1]),
        (12, [500, 500, 1000], [3, 3, 6]),
        (12, [500, 500, 500], [4, 4, 4]),
        (12, [312, 518, 1024], [2, 3, 7]),
        (12, [312, 468, 1092], [2, 3, 7]),
        (20, [900, 50, 50], [18, 1, 1]),
    ],
)
def test_layers_are_shared_as_exo_shares_them(
    total: int, weights: list[int], layers: list[int]
) -> None:
    # exo raises for no nodes and for fewer layers than nodes; here `plan` has refused both before.
    assert proportional_layers(total, weights) == layers


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=16), st.integers(0, 200))
def test_shares_sum_to_the_total_and_nobody_goes_without(weights: list[int], more: int) -> None:
    counts = proportional_layers(len(weights) + more, weights)
    assert sum(counts) == len(weights) + more
    assert min(counts) >= 1
