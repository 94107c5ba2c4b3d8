"""Each of several requests that place one model at once is told what became of its placement."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from cluster_world import World
from test_stories import ALONE, PAIR, M, loads, placed

from exo_node.node.placements.loaded_placement import LoadedPlacement
from exo_node.placement.card import BlockDrafter
from exo_node.placement.errors import LoadFailed, PlacementSuperseded
from exo_node.placement.ids import ModelId
from exo_node.placement.options import PlanOptions

DRAFTER = BlockDrafter(model=ModelId("a/drafter"))


def place(
    world: World, options: PlanOptions, replicas: int = 1, *, auto_replicas: bool = False
) -> "asyncio.Task[LoadedPlacement]":
    placing = world.leader().place(M, options, replicas, auto_replicas=auto_replicas)
    return asyncio.ensure_future(placing)


@pytest.mark.parametrize(
    ("options", "others", "change"),
    [
        (replace(ALONE, context=256), {}, "with context 256 instead of 512"),
        (replace(ALONE, kv_bits=8), {}, "with kv_bits 8 instead of null"),
        (replace(ALONE, drafter=DRAFTER), {}, 'with drafter "a/drafter" instead of null'),
        (PAIR, {}, "with min_nodes 2 instead of 1, max_nodes 2 instead of 1"),
        (ALONE, {"replicas": 2}, "with replicas 2 instead of 1"),
        (ALONE, {"auto_replicas": True}, 'with replicas "auto" instead of 1'),
    ],
)
async def test_a_request_learns_which_later_one_took_its_place_during_its_load(
    world: World, options: PlanOptions, others: Mapping[str, Any], change: str
) -> None:
    first, second = place(world, ALONE), place(world, options, **others)
    with pytest.raises(PlacementSuperseded, match=change):
        _ = await first
    record = await second
    assert record.options == options and record.status == "ready"


async def test_the_last_of_several_requests_at_once_is_placed_and_all_others_learn_of_it(
    world: World,
) -> None:
    contexts = [512, 256, 128, 64]
    requests = [place(world, replace(ALONE, context=context)) for context in contexts]
    *superseded, last = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(outcome) for outcome in superseded] == [PlacementSuperseded] * 3
    assert isinstance(last, LoadedPlacement) and last.options.context == 64


async def test_a_request_like_one_that_was_superseded_is_placed(world: World) -> None:
    requests = [place(world, replace(ALONE, context=context)) for context in (512, 256, 512)]
    first, second, last = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(second, PlacementSuperseded)
    assert isinstance(last, LoadedPlacement) and last.options.context == 512
    assert isinstance(first, PlacementSuperseded)


async def test_requests_for_the_same_placement_share_it(world: World) -> None:
    records = await asyncio.gather(*(place(world, PAIR, auto_replicas=True) for _ in range(3)))
    assert len({record.id for record in records}) == 1 and loads(world) == 2


async def test_a_request_for_other_options_after_a_load_supersedes_no_answer(world: World) -> None:
    first = await place(world, ALONE)
    second = await place(world, PAIR)
    assert (first.options, second.options) == (ALONE, PAIR)


async def test_a_request_whose_model_is_removed_during_its_load_learns_it(world: World) -> None:
    placing = place(world, PAIR)
    await world.until(lambda: world.leader().records)
    answer = world.ask(M, 3)
    await world.leader().remove(world.leader().records[0].id)
    with pytest.raises(PlacementSuperseded, match="meanwhile another request removed the mod"):
        _ = await placing
    await answer  # it takes any placement, and loads one


async def test_a_superseded_request_leaves_what_the_later_one_desires(world: World) -> None:
    await placed(world, ALONE)
    world.fail_loads(9)
    first, second = place(world, PAIR), place(world, replace(PAIR, context=256))
    with pytest.raises(PlacementSuperseded):
        _ = await first
    desired = world.leader().desired.get(M)
    assert desired is not None and desired.options.context == 256
    with pytest.raises(LoadFailed):
        _ = await second


@pytest.mark.parametrize("answers", [0, 1])
@pytest.mark.parametrize("serves", [False, True])
async def test_a_superseded_placement_is_not_loaded_where_the_later_one_fails(
    world: World, serves: bool, answers: int
) -> None:
    """The one that served before both is loaded again."""
    if serves:
        await placed(world, ALONE)
    world.fail_loads(9)
    requests = [place(world, replace(PAIR, context=context)) for context in (512, 256, 256)]
    waiting = [world.ask(M, 3) for _ in range(answers)]
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(each) for each in outcomes] == [PlacementSuperseded, LoadFailed, LoadFailed]
    _ = await asyncio.gather(*waiting)  # they had the same error
    world.fail_loads(0)
    await world.until(lambda: len(world.serving(M)) == serves, 10)
    count = loads(world)
    await asyncio.sleep(700)
    records = [record for record in world.leader().records if not record.is_former]
    assert [(each.options, each.status) for each in records] == [(ALONE, "ready")] * serves
    assert loads(world) == count
