"""Bits of attention's caches that a placement or a head asks for, over losses and heads."""

import asyncio

import pytest
from cluster_world import CONTEXT, World
from test_stories import M, loads, placed

from exo_node.placement.errors import InvalidRequest
from exo_node.placement.ids import NodeId
from exo_node.placement.options import PlanOptions

EIGHT = PlanOptions(min_nodes=2, max_nodes=2, context=CONTEXT, kv_bits=8)
WINDOWS = "its caches are windows"


def bits(world: World) -> set[int]:
    """The bits that runners of the model have."""
    return {process.spec.kv_bits for _, _, process in world.processes()}


async def test_a_lost_stage_and_the_next_head_keep_the_bits_of_the_placement(world: World) -> None:
    world.kv_bits = {NodeId("b"): 4}
    await placed(world, EIGHT)
    await world.kill("a")
    await world.until(lambda: world.serving(M) and world.leader().leading.is_set())
    [record] = world.leader().records
    assert bits(world) == {8}
    assert (record.options.kv_bits, record.plan.kv_bits.source) == (8, "placement")
    assert "kv_bits = 8 was requested" in record.plan.reason
    before = loads(world)
    await asyncio.sleep(100)
    assert loads(world) == before and bits(world) == {8}


async def test_a_head_with_another_setting_keeps_what_runs_and_plans_with_its_own(
    world: World,
) -> None:
    world.kv_bits = {NodeId("a"): 4, NodeId("b"): 0}
    await placed(world, PlanOptions(nodes=(NodeId("c"),), context=CONTEXT))
    assert bits(world) == {4}
    await world.kill("a")
    await world.until(lambda: world.leader().leading.is_set())
    await asyncio.sleep(100)
    [record] = world.leader().records
    assert bits(world) == {4} and record.plan.kv_bits.reason == "EXO_KV_BITS=4 on the head"
    await placed(world, PlanOptions(nodes=(NodeId("b"),), context=CONTEXT))
    await world.until(lambda: bits(world) == {0})


async def test_other_bits_are_loaded_beside_an_answer_which_ends_on_its_own(world: World) -> None:
    await placed(world, PlanOptions(context=CONTEXT))
    answer = world.ask(M, 20)
    await asyncio.sleep(5)
    await placed(world, PlanOptions(context=CONTEXT, kv_bits=4))
    assert bits(world) == {0, 4} and not answer.done()
    await answer
    await world.until(lambda: bits(world) == {4})


async def test_replicas_have_the_bits_of_the_request(world: World) -> None:
    _ = await world.leader().place(M, PlanOptions(context=CONTEXT, kv_bits=8), replicas=2)
    await world.until(lambda: len(world.serving(M)) == 2)
    assert bits(world) == {8}


@pytest.mark.world(count=1)
async def test_a_setting_that_a_load_refuses_is_left_out_and_the_placement_says_so(
    world: World,
) -> None:
    world.kv_bits, world.kv_refusals = {NodeId("a"): 8}, ((M, WINDOWS),)
    await world.ask(M, 3)
    [record] = world.leader().records
    assert bits(world) == {0} and record.status == "ready"
    assert f"EXO_KV_BITS=8 on the head does not apply, because {WINDOWS}" in record.plan.reason
    assert loads(world) == 2


async def test_a_request_that_a_load_refuses_fails_and_what_was_desired_before_answers(
    world: World,
) -> None:
    world.kv_refusals = ((M, WINDOWS),)
    await placed(world, PlanOptions(context=CONTEXT))
    with pytest.raises(InvalidRequest, match=WINDOWS) as caught:
        _ = await world.leader().place(M, PlanOptions(context=CONTEXT, kv_bits=8))
    assert caught.value.param == "kv_bits"
    assert caught.value.message.endswith("leave kv_bits out of the placement, or send 0")
    await world.ask(M, 3)
    assert bits(world) == {0} and world.serving(M)


async def test_the_bits_of_a_card_that_a_load_refuses_are_given_up(world: World) -> None:
    world.kv_refusals, world.card_bits = ((M, WINDOWS),), 8
    await world.ask(M, 3)
    assert f"error {M}" in world.calls and not world.processes()
