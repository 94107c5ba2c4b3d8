"""The statistics of the benches."""

from exo_node_bench.spread import Spread, quotient, rotated, spread


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 8.0]) == Spread.of([8.0, 3.0, 1.0]) == Spread(3.0, 1.0, 8.0)
    assert f"{spread([3.0, 1.0, 8.0]):.1f}" == "3.0 (1.0-8.0)"


def test_without_a_value_or_with_a_repeat_that_has_none_there_is_no_spread() -> None:
    assert Spread.of([]) is None
    assert Spread.of([1.0, None, 2.0]) is None


def test_ratios_are_taken_within_a_repeat() -> None:
    assert Spread.of_ratios([2.0, 8.0], [1.0, 2.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of_ratios([2.0, 8.0], [1.0, 0.0]) is None
    assert quotient(None, 1.0) is None


def test_another_one_begins_each_time() -> None:
    orders = ["".join(rotated("abc", turn)) for turn in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]
