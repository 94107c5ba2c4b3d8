"""What the planner believes of a node: memory that other models leave of it, and its times."""

from typing import Any

import pytest

from exo_node.node.cluster.member import MemberFacts
from exo_node.node.placements.planner_view import node_facts, remaining_bytes
from exo_node.placement.ids import ModelId, NodeId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.bounds import fault

NODES = (NodeId("a" * 20), NodeId("b" * 20))
MODELS = [ModelId(f"model-{i}") for i in range(5)]


def test_a_model_takes_what_it_was_promised_or_what_it_uses() -> None:
    a, b = MODELS[:2]
    assert remaining_bytes(100, {a: 30}, {}) == 70
    assert remaining_bytes(100, {a: 30}, {a: 10}) == 70
    assert remaining_bytes(100, {a: 30}, {a: 50}) == 50
    assert remaining_bytes(100, {a: 30}, {b: 50}) == 20
    assert remaining_bytes(100, {a: 90}, {b: 50}) == 0


def test_a_view_subtracts_promises_of_other_models_only() -> None:
    loading = pb.StageState(model=MODELS[0], weight_bytes=0)
    member = MemberFacts(pb.NodeFacts(id=NODES[0], memory_bytes=100), [loading])
    promises = {MODELS[0]: 60, MODELS[1]: 10}
    assert node_facts(member, MODELS[0], promises).memory_bytes == 90
    assert node_facts(member, MODELS[2], promises).memory_bytes == 30
    assert node_facts(member, MODELS[2]).memory_bytes == 100


@pytest.mark.parametrize(
    "figures",
    [{"decode_s": 5e-324}, {"decode_s": 1e-300}, {"tail_s": 1e18}, {"verify_s": 3600.0}],
    ids=str,
)
def test_times_of_another_node_that_none_can_have_count_for_nothing(
    figures: dict[str, Any],
) -> None:
    """One over a few of the least seconds is infinity, which is no JSON."""
    honest: dict[str, Any] = {"decode_s": 1e-3, "verify_s": 1e-3, "tail_s": 1e-3}
    for given, counts in ((honest, True), ({**honest, **figures}, False)):
        times = pb.LayerTimes(
            model=MODELS[0], dtype="float32", layer_bytes=9, verify_rows=4, **given
        )
        assert fault(times) is None  # numbers of a sensible size, all of them
        facts = node_facts(MemberFacts(pb.NodeFacts(id=NODES[0], profiles=[times]), []), MODELS[0])
        assert (facts.profile is not None) is counts
        assert bool(facts.measured) is counts
