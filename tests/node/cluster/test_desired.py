"""Desired placements outlive the head that received their requests."""

from dataclasses import replace

import pytest

from exo_node.node.cluster.desired import Desired, DesiredPlacements, desired_from_wire, relaxed
from exo_node.placement.card import BlockDrafter
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

DRAFTER = BlockDrafter(
    model=ModelId("a/drafter"), default_k=2, max_k=5, weight_bytes=77, cached_numbers=9
)
DEMO, OTHER = ModelId("demo"), ModelId("other")
A, B, C = (NodeId(letter * 20) for letter in "abc")

ASKED = [
    Desired(DEMO, requested_at=0.0),
    Desired(
        DEMO, PlanOptions(min_nodes=2, max_nodes=3, context=4096), replicas=3, requested_at=0.0
    ),
    Desired(DEMO, PlanOptions(exclude=frozenset({A, B})), requested_at=0.0),
    Desired(DEMO, PlanOptions(nodes=(B, A)), auto_replicas=True, requested_at=0.0),
    Desired(DEMO, PlanOptions(layers=((B, 5), (A, 11))), requested_at=0.0),
    Desired(DEMO, PlanOptions(kv_bits=8), requested_at=0.0),
    Desired(DEMO, PlanOptions(kv_bits=0), requested_at=0.0),
    Desired(DEMO, PlanOptions(drafter=DRAFTER), requested_at=0.0),
    Desired(DEMO, PlanOptions(drafter="none"), requested_at=0.0),
    Desired(DEMO, keep_alive_s=30.0, used_at=100.0),
]
HEAD = NodeId("h" * 20)


def learner_of(head: DesiredPlacements, later_s: float = 0.0) -> DesiredPlacements:
    """The state of a node that follows the head and received its heartbeat."""
    other = DesiredPlacements(lambda: 5000.0 + later_s)
    wire = [pb.DesiredPlacement.FromString(each.SerializeToString()) for each in head.to_wire()]
    other.learn(HEAD, wire, followed=True)
    return other


@pytest.mark.parametrize("wish", ASKED, ids=range(len(ASKED)))
def test_the_next_head_has_the_desired_placements_of_the_last_one(wish: Desired) -> None:
    head = DesiredPlacements(lambda: 110.0)
    head.note(wish)
    desired = learner_of(head).get(DEMO)
    assert desired is not None
    idle = replace(wish, used_at=desired.used_at)
    assert desired == idle
    assert desired.used_at == (4990.0 if wish.used_at == 100.0 else wish.used_at), "ten seconds ago"


def test_bits_of_caches_that_this_version_does_not_know_are_left_to_the_card() -> None:
    message = pb.DesiredPlacement(model=DEMO, kv_bits=6)
    assert desired_from_wire(message, 0.0).options == PlanOptions()


def test_a_drafter_that_no_card_could_name_is_left_to_the_card() -> None:
    drafter = pb.BlockDrafter(model="a/drafter", default_k=9, max_k=3)
    message = pb.DesiredPlacement(model=DEMO, drafter=drafter)
    assert desired_from_wire(message, 0.0).options == PlanOptions()


@pytest.mark.parametrize(
    "pinned", [PlanOptions(nodes=(A, B)), PlanOptions(layers=((A, 5), (B, 11)))]
)
@pytest.mark.parametrize("live", [(A, B, C), (A, C), (C,)])
def test_pinned_nodes_are_kept_while_all_of_them_are_live(
    pinned: PlanOptions, live: tuple[NodeId, ...]
) -> None:
    free = replace(pinned, nodes=(), layers=())
    assert relaxed(pinned, live) == (pinned if {A, B} <= {*live} else free)


@pytest.mark.parametrize(("exclude", "least"), [([], 2), ([B], 1), ([A, B], 1)])
def test_fewer_nodes_will_do_where_no_more_are_live(exclude: list[NodeId], least: int) -> None:
    options = PlanOptions(min_nodes=3, exclude=frozenset(exclude))
    assert relaxed(options, [A, B]).min_nodes == least


def test_a_removed_placement_is_removed_on_every_node() -> None:
    head, follower = DesiredPlacements(), DesiredPlacements()
    head.note(ASKED[1])
    head.note(replace(ASKED[2], model=OTHER))
    follower.learn(HEAD, head.to_wire(), followed=True)
    head.forget(DEMO)
    head.forget(DEMO)
    follower.learn(HEAD, head.to_wire(), followed=True)
    assert follower.get(DEMO) is None
    assert follower.get(OTHER) == replace(ASKED[2], model=OTHER)


def test_the_last_desires_of_another_head_outlive_it_until_they_are_taken() -> None:
    head, other = DesiredPlacements(), DesiredPlacements()
    head.note(ASKED[1])
    other.learn(A, head.to_wire(), followed=False)
    assert other.get(DEMO) is None
    assert other.take(lambda _: True) == {}, "it still leads"
    assert other.take(lambda _: False) == {DEMO: ASKED[1]}
    assert other.take(lambda _: False) == {}
    other.learn(A, head.to_wire(), followed=False)
    other.learn(B, [], followed=True)
    assert other.take(lambda _: False) == {}, "a head that is followed speaks for all"


def test_a_head_sends_the_desired_placements_that_it_received() -> None:
    """Across two changes of the head."""
    first = DesiredPlacements()
    first.note(ASKED[3])
    assert learner_of(learner_of(first)).get(DEMO) == ASKED[3]
