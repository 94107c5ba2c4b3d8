"""Reachability between two nodes."""

from exo_node.node.cluster.member import Reach


def test_a_reach_without_exchanges_has_no_values() -> None:
    assert set(Reach().describe(7.0).values()) == {None}
    assert Reach(5.0, 6.5).describe(7.0) == {"answered_ago_s": 2.0, "heard_ago_s": 0.5}
