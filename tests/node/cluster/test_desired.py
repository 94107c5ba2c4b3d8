"""What was asked of a placement outlives the head that was asked."""

from dataclasses import replace

import pytest

from exo_node.node.cluster.desired import DesiredPlacement, DesiredPlacements
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

DEMO, OTHER = ModelId("demo"), ModelId("other")
A, B, C = (NodeId(letter * 20) for letter in "abc")

ASKED = [
    DesiredPlacement(),
    DesiredPlacement(PlanOptions(min_nodes=2, max_nodes=3, context=4096), spares=1),
    DesiredPlacement(PlanOptions(exclude=frozenset({A, B}))),
    DesiredPlacement(PlanOptions(nodes=(B, A)), spares=4),
    DesiredPlacement(PlanOptions(layers=((B, 5), (A, 11)))),
]


def heard(head: DesiredPlacements) -> DesiredPlacements:
    """Another node's, by what the head tells it over the wire."""
    other = DesiredPlacements()
    other.learn([pb.DesiredPlacement.FromString(each.SerializeToString()) for each in head.told()])
    return other


@pytest.mark.parametrize("wish", ASKED, ids=range(len(ASKED)))
def test_a_node_that_becomes_the_head_knows_what_the_old_one_was_asked(
    wish: DesiredPlacement,
) -> None:
    head = DesiredPlacements()
    head.note(DEMO, wish)
    known = heard(head).of(DEMO)
    assert (known.options, known.spares) == (wish.options, wish.spares)
    assert known.flexible, "the old head is gone: as many nodes as before may not be there"


@pytest.mark.parametrize(
    "pinned", [PlanOptions(nodes=(A, B)), PlanOptions(layers=((A, 5), (B, 11)))]
)
@pytest.mark.parametrize("live", [(A, B, C), (A, C), (C,)])
@pytest.mark.parametrize("flexible", [True, False])
def test_pinned_nodes_are_kept_while_all_of_them_are_live(
    pinned: PlanOptions, live: tuple[NodeId, ...], flexible: bool
) -> None:
    view = ClusterView(tuple(NodeFacts(node, node[0], 10**10, 1e11) for node in live))
    kept = DesiredPlacement(pinned, flexible=flexible).within(view)
    free = replace(pinned, nodes=(), layers=())
    assert kept == (pinned if {A, B} <= {*live} or not flexible else free)


def test_what_nobody_asked_for_is_left_to_the_planner() -> None:
    assert heard(DesiredPlacements()).of(DEMO) == DesiredPlacement(flexible=True)


def test_what_was_removed_is_forgotten_everywhere() -> None:
    head, follower = DesiredPlacements(), DesiredPlacements()
    head.note(DEMO, ASKED[1])
    head.note(OTHER, ASKED[2])
    follower.learn(head.told())
    head.forget(DEMO)
    head.forget(DEMO)
    follower.learn(head.told())
    assert follower.of(DEMO) == DesiredPlacement(flexible=True)
    assert follower.of(OTHER).options == ASKED[2].options


def test_a_head_goes_on_telling_what_it_learnt() -> None:
    """Two heads later it still holds."""
    first = DesiredPlacements()
    first.note(DEMO, ASKED[3])
    assert heard(heard(first)).of(DEMO).options == ASKED[3].options
