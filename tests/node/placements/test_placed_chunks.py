"""Chunks of prompts that a GPU fault has shortened, over losses."""

import asyncio

import pytest
from cluster_world import CONTEXT, World
from test_stories import M, loads, placed

from exo_node.node.machine.timing import LAN
from exo_node.placement.gpu_faults import ChunkLimit
from exo_node.placement.ids import NodeId
from exo_node.placement.options import PlanOptions

SHORT = ChunkLimit(64, "watchdog")


def chunks(world: World) -> set[int]:
    """The chunks that runners of the model have."""
    return {process.spec.prefill_chunk for _, _, process in world.processes()}


@pytest.mark.world(count=1)
async def test_what_a_gpu_fault_ended_is_loaded_again_with_the_chunk_of_its_node(
    world: World,
) -> None:
    """The head, which learns that chunk seconds later, is refused and asks again, not at once."""
    await placed(world, PlanOptions(context=CONTEXT))
    [before] = chunks(world)
    assert before > SHORT.rows
    answer, began = world.ask(M, 30), loads(world)
    await asyncio.sleep(3)
    [(node, _, process)] = world.processes()
    world.chunk_limits[NodeId(node)] = SHORT
    world.crash(node, process.spec.placement, process.spec.stage)
    await answer
    assert chunks(world) == {SHORT.rows}
    [record] = world.leader().records
    assert "prompts are read 64 tokens at a time" in record.plan.reason
    assert loads(world) - began <= 20 / LAN.watch_s + 2, "not in a circle"
    assert f"error {M}" not in world.calls


@pytest.mark.world(count=2)
async def test_a_stage_that_a_gpu_fault_ended_stays_with_another_node_that_takes_its_chunk(
    world: World,
) -> None:
    await placed(world, PlanOptions(min_nodes=2, max_nodes=2, context=CONTEXT))
    answer = world.ask(M, 30)
    await asyncio.sleep(3)
    node, _, process = world.processes()[-1]
    limits = {NodeId(node): SHORT}
    world.chunk_limits, world.known_chunk_limits = limits, limits
    world.crash(node, process.spec.placement, process.spec.stage)
    await answer
    await asyncio.sleep(100)
    holders = {holder for holder, _, _ in world.processes()}
    assert node not in holders and min(chunks(world)) > SHORT.rows
    assert f"load {process.spec.placement}/1 on {node}" in world.calls  # the first one
    assert world.calls.count(f"load {process.spec.placement}/1 on {node}") == 1
