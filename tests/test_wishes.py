"""What was asked of a placement outlives the head that was asked."""

import pytest

from exo_node.node.cluster.desired import Wish, Wishes
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

DEMO, OTHER = ModelId("demo"), ModelId("other")
A, B = NodeId("a" * 20), NodeId("b" * 20)

ASKED = [
    Wish(),
    Wish(PlanOptions(min_nodes=2, max_nodes=3, context=4096), spares=1),
    Wish(PlanOptions(exclude=frozenset({A, B}))),
    Wish(PlanOptions(nodes=(B, A)), spares=4),
    Wish(PlanOptions(layers=((B, 5), (A, 11)))),
]


def heard(head: Wishes) -> Wishes:
    """Another node's, by what the head tells it over the wire."""
    other = Wishes()
    other.learn([pb.Wish.FromString(each.SerializeToString()) for each in head.told()])
    return other


@pytest.mark.parametrize("wish", ASKED, ids=range(len(ASKED)))
def test_a_node_that_becomes_the_head_knows_what_the_old_one_was_asked(wish: Wish) -> None:
    head = Wishes()
    head.note(DEMO, wish)
    known = heard(head).of(DEMO)
    assert (known.options, known.spares) == (wish.options, wish.spares)
    assert known.flexible, "the old head is gone: as many nodes as before may not be there"


def test_what_nobody_asked_for_is_left_to_the_planner() -> None:
    assert heard(Wishes()).of(DEMO) == Wish(flexible=True)


def test_what_was_removed_is_forgotten_everywhere() -> None:
    head, follower = Wishes(), Wishes()
    head.note(DEMO, ASKED[1])
    head.note(OTHER, ASKED[2])
    follower.learn(head.told())
    head.forget(DEMO)
    head.forget(DEMO)
    follower.learn(head.told())
    assert follower.of(DEMO) == Wish(flexible=True)
    assert follower.of(OTHER).options == ASKED[2].options


def test_a_head_goes_on_telling_what_it_learnt() -> None:
    """Two heads later it still holds."""
    first = Wishes()
    first.note(DEMO, ASKED[3])
    assert heard(heard(first)).of(DEMO).options == ASKED[3].options
