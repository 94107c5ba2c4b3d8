"""Clock differences and reachability between two nodes."""

import pytest

from exo_node.node.cluster.member import ClockDifference, Reach, clock_difference


@pytest.mark.parametrize(
    ("sent_ms", "took_s", "ahead_s"),
    [(1_000_000, 0.0, 0.0), (1_000_000, 0.4, 0.2), (1_003_000, 0.4, 3.2), (990_000, 0.0, -10.0)],
)
def test_a_clock_is_compared_with_the_middle_of_the_exchange(
    sent_ms: int, took_s: float, ahead_s: float
) -> None:
    difference = clock_difference(sent_ms, took_s, 1000.0)
    assert difference.ahead_s == pytest.approx(ahead_s)
    assert difference.within_s == took_s / 2


def test_a_reach_without_exchanges_has_no_values() -> None:
    assert set(Reach().describe(7.0).values()) == {None}
    reach = Reach(5.0, 6.5, ClockDifference(-1.25, 0.002))
    assert reach.describe(7.0) == {
        "answered_ago_s": 2.0,
        "heard_ago_s": 0.5,
        "clock_ahead_s": -1.25,
        "clock_within_s": 0.002,
    }
