"""Desired placements outlive the head that received their requests."""

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


def learner_of(head: DesiredPlacements) -> DesiredPlacements:
    """The state of another node that has received the head's over the wire."""
    other = DesiredPlacements()
    other.learn([pb.DesiredPlacement.FromString(each.SerializeToString()) for each in head.told()])
    return other


@pytest.mark.parametrize("wish", ASKED, ids=range(len(ASKED)))
def test_the_next_head_has_the_desired_placements_of_the_last_one(
    wish: DesiredPlacement,
) -> None:
    head = DesiredPlacements()
    head.note(DEMO, wish)
    desired = learner_of(head).of(DEMO)
    assert (desired.options, desired.spares) == (wish.options, wish.spares)
    assert desired.flexible, "the old head is gone: as many nodes as before may not be there"


@pytest.mark.parametrize(
    "pinned", [PlanOptions(nodes=(A, B)), PlanOptions(layers=((A, 5), (B, 11)))]
)
@pytest.mark.parametrize("live", [(A, B, C), (A, C), (C,)])
@pytest.mark.parametrize("flexible", [True, False])
def test_pinned_nodes_are_kept_while_all_of_them_are_live(
    pinned: PlanOptions, live: tuple[NodeId, ...], flexible: bool
) -> None:
    view = ClusterView(tuple(NodeFacts(node, node[0], 10**10, 1e11) for node in live))
    desired = DesiredPlacement(pinned, flexible=flexible).within(view)
    free = replace(pinned, nodes=(), layers=())
    assert desired == (pinned if {A, B} <= {*live} or not flexible else free)


def test_a_model_without_a_request_is_left_to_the_planner() -> None:
    assert learner_of(DesiredPlacements()).of(DEMO) == DesiredPlacement(flexible=True)


def test_a_removed_placement_is_removed_on_every_node() -> None:
    head, follower = DesiredPlacements(), DesiredPlacements()
    head.note(DEMO, ASKED[1])
    head.note(OTHER, ASKED[2])
    follower.learn(head.told())
    head.forget(DEMO)
    head.forget(DEMO)
    follower.learn(head.told())
    assert follower.of(DEMO) == DesiredPlacement(flexible=True)
    assert follower.of(OTHER).options == ASKED[2].options


def test_a_head_sends_the_desired_placements_that_it_received() -> None:
    """Across two changes of the head."""
    first = DesiredPlacements()
    first.note(DEMO, ASKED[3])
    assert learner_of(learner_of(first)).of(DEMO).options == ASKED[3].options
