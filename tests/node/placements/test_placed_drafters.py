"""A block drafter that a placement names in place of the card's, over losses and heads."""

from dataclasses import replace

import pytest
from cluster_world import CONTEXT, World
from test_stories import M, placed

from exo_node.placement.card import BlockDrafter
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

DRAFTER = BlockDrafter(
    model=ModelId("a/drafter"), default_k=2, max_k=5, weight_bytes=4_000_000, cached_numbers=8
)
NAMED = PlanOptions(max_nodes=1, context=CONTEXT, drafter=DRAFTER)


def specs(world: World) -> list[pb.StageSpec]:
    return [process.spec for _, _, process in world.processes()]


async def test_a_placement_has_the_drafter_that_it_names_and_counts_it(world: World) -> None:
    await placed(world, PlanOptions(max_nodes=1, context=CONTEXT))
    [plain] = specs(world)
    before = world.leader().runners[0].plan.memory[0]
    assert not plain.drafter and not plain.drafter_required
    await placed(world, NAMED)
    await world.until(lambda: len(specs(world)) == 1)
    [spec] = specs(world)
    assert (spec.drafter, spec.drafter_bytes, spec.max_draft_tokens) == ("a/drafter", 4_000_000, 5)
    assert spec.drafter_required
    [record] = world.leader().records
    assert record.card.drafter == DRAFTER
    assert world.leader().runners[0].plan.memory[0] > before


async def test_a_lost_runner_and_the_next_head_keep_it(world: World) -> None:
    await placed(world, replace(NAMED, nodes=(NodeId("b"),)))
    await world.kill("a")
    await world.until(lambda: world.serving(M) and world.leader().leading.is_set())
    [record] = world.leader().records
    assert record.options.drafter == DRAFTER and record.card.drafter == DRAFTER
    world.machines[NodeId("b")].processes.clear()
    await world.until(lambda: not world.serving(M))
    await world.until(lambda: bool(world.serving(M)))
    [spec] = specs(world)
    assert spec.drafter == "a/drafter" and spec.drafter_required


async def test_none_is_loaded_without_the_cards_drafter(world: World) -> None:
    world.card_drafter = DRAFTER
    await placed(world, PlanOptions(max_nodes=1, context=CONTEXT))
    [spec] = specs(world)
    assert spec.drafter == "a/drafter" and not spec.drafter_required
    await placed(world, PlanOptions(max_nodes=1, context=CONTEXT, drafter="none"))
    await world.until(lambda: [each.drafter for each in specs(world)] == [""])


async def test_one_that_no_node_can_load_fails_and_what_was_desired_before_answers(
    world: World,
) -> None:
    await placed(world, PlanOptions(max_nodes=1, context=CONTEXT))
    for machine in world.machines.values():
        machine.fails = [InvalidCheckpoint("it is not here", param="drafter") for _ in range(9)]
    with pytest.raises(InvalidCheckpoint, match="it is not here"):
        _ = await world.leader().place(M, NAMED)
    for machine in world.machines.values():
        machine.fails.clear()
    await world.ask(M, 3)
    assert [each.drafter for each in specs(world)] == [""]
