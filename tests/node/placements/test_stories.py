"""Courses of events in virtual time over the real loop."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from cluster_world import CONTEXT, World

from exo_node.node.placements import placements
from exo_node.node.placements.reconcile import reconcile
from exo_node.node.placements.state import Action
from exo_node.placement.errors import HeadGone, InsufficientMemory, InvalidRequest, LoadFailed
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions

M, N = ModelId("m"), ModelId("n")
ALONE = PlanOptions(max_nodes=1, context=CONTEXT)
PAIR = PlanOptions(min_nodes=2, max_nodes=2, context=CONTEXT)
TRIO = PlanOptions(min_nodes=3, max_nodes=3, context=CONTEXT)


def loads(world: World) -> int:
    return sum(call.startswith("load") for call in world.calls)


async def placed(
    world: World, options: PlanOptions = PAIR, replicas: int = 1, *, auto_replicas: bool = False
) -> None:
    _ = await world.leader().place(M, options, replicas, auto_replicas=auto_replicas)
    await world.until(lambda: world.serving(M))


async def test_requests_share_one_load_and_the_model_stays(world: World) -> None:
    answers = [world.ask(M, 3) for _ in range(8)]
    _ = await asyncio.gather(*answers)
    assert loads(world) == len(world.processes())
    before = list(world.calls)
    await asyncio.sleep(2000)
    assert world.calls == before and world.serving(M)


async def test_answers_of_a_ready_model_begin_and_end_without_a_pass(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = list[None]()

    def counted(*args: Any) -> list[Action]:
        passes.append(None)
        return reconcile(*args)

    await placed(world)
    monkeypatch.setattr(placements, "reconcile", counted)
    before = world.now
    for _ in range(20):
        _ = await asyncio.gather(*(world.ask(M, 0.9) for _ in range(5)))
    assert len(passes) <= 1 + (world.now - before) / world.timing.watch_s


async def test_a_stages_node_dies_under_answers_which_resume(world: World) -> None:
    await placed(world)
    answer = world.ask(M, 30)
    await asyncio.sleep(3)
    _, lost_node = world.serving(M)[0]
    await world.kill(lost_node)
    await answer
    assert lost_node not in world.serving(M)[0]
    assert loads(world) == 3, "the other stage stayed"


async def test_a_whole_model_is_killed_twice_under_an_answer(world: World) -> None:
    await placed(world, ALONE)
    answer = world.ask(M, 20)
    for _ in range(2):
        await asyncio.sleep(6)
        [(node, (name, stage), _)] = world.processes()
        world.crash(node, name, stage)
    await answer
    assert len(world.serving(M)) == 1


@pytest.mark.world(count=2)
async def test_replicas_follow_the_answers_where_that_is_desired(world: World) -> None:
    await placed(world, ALONE, auto_replicas=True)
    answers = [world.ask(M, 60, "a") for _ in range(4)]
    await world.until(lambda: len(world.serving(M)) == 2, 20)
    more = [world.ask(M, 20, "a") for _ in range(2)]
    await asyncio.sleep(3)
    assert sorted(record.activity.requests for record in world.leader().records) == [2, 4]
    await asyncio.gather(*answers, *more)
    assert len(world.serving(M)) == 2
    await world.until(lambda: len(world.serving(M)) == 1, 200)
    grown = [e.text for e in world.heads[NodeId("a")].events.entries() if e.kind == "replicas"]
    assert [text.split(":")[0] for text in grown] == [
        "m has 2 replicas now",
        "m has 1 replica now",
    ]


async def test_replicas_share_answers_and_those_of_a_lost_one_resume_on_another(
    world: World,
) -> None:
    await placed(world, ALONE, replicas=2)
    await world.until(lambda: len(world.serving(M)) == 2)
    answers = [world.ask(M, 20, "a") for _ in range(8)]
    await asyncio.sleep(3)
    records = world.leader().records
    assert [record.activity.requests for record in records] == [4, 4]
    lost_node = next(r.stages[0].node for r in records if r.stages[0].node != "a")
    start, before = world.now, loads(world)
    await world.kill(lost_node)
    _ = await asyncio.gather(*answers)
    assert world.now - start < 30 and "error" not in " ".join(world.calls)
    await world.until(lambda: len(world.serving(M)) == 2)
    assert loads(world) == before + 1, "the other one stayed"


async def test_one_of_two_replicas_is_removed_by_its_id(world: World) -> None:
    await placed(world, ALONE, replicas=2)
    await world.until(lambda: len(world.serving(M)) == 2)
    first, second = world.leader().records
    await world.leader().remove(second.id)
    assert [record.id for record in world.leader().records] == [first.id]
    await asyncio.sleep(60)
    assert len(world.serving(M)) == 1, "it does not come back"


async def test_one_stage_fails_to_load_and_only_that_one_is_tried_elsewhere(world: World) -> None:
    world.fail_loads(1, "b")
    await placed(world)
    assert world.serving(M) == [["a", "c"]]
    assert loads(world) == 3


async def test_a_model_that_fails_everywhere_is_refused_and_nothing_is_repeated(
    world: World,
) -> None:
    world.fail_loads(9)
    with pytest.raises(LoadFailed, match="it broke"):
        await placed(world, ALONE)
    before = loads(world)
    await asyncio.sleep(700)
    assert loads(world) == before == 3
    world.fail_loads(0)
    await placed(world, ALONE)


@pytest.mark.world(count=2)
async def test_runners_that_no_call_reaches_end_the_requests_with_the_reason(world: World) -> None:
    for machine in world.machines.values():
        machine.unreachable = True
    for request in range(2):  # the second one during the pause
        with pytest.raises(LoadFailed, match=r"cannot call it there \(nobody listens at"):
            async with asyncio.timeout(180):
                _ = await world.leader().ensure(M)
        assert request or loads(world) > 3
    before = loads(world)
    await asyncio.sleep(700)
    assert loads(world) == before
    for machine in world.machines.values():
        machine.unreachable = False
    await world.ask(M, 5)
    assert not [call for call in world.calls if call.startswith("error")]


@pytest.mark.world(count=2)
async def test_a_node_whose_runners_no_call_reaches_is_left_out(world: World) -> None:
    world.machines[NodeId("a")].unreachable = True
    await world.ask(M, 5)
    assert world.serving(M) and "a" not in world.serving(M)[0]
    assert not [call for call in world.calls if call.startswith("error")]


@pytest.mark.world(count=1)
async def test_one_machine_whose_runners_are_reached_at_last_serves(world: World) -> None:
    world.machines[NodeId("a")].unreachable = True
    answer = world.ask(M, 5)
    await world.until(lambda: loads(world) == 2)
    world.machines[NodeId("a")].unreachable = False
    await answer
    assert world.serving(M) == [["a"]]
    assert not [call for call in world.calls if call.startswith("error")]


@pytest.mark.parametrize("options", [PlanOptions(min_nodes=4), replace(ALONE, context=4096)])
@pytest.mark.world(room=1.01)
async def test_what_cannot_be_met_is_refused_and_what_ran_before_stays(
    world: World, options: PlanOptions
) -> None:
    await placed(world, ALONE)
    with pytest.raises((InvalidRequest, InsufficientMemory)):
        _ = await world.leader().place(M, options)
    await asyncio.sleep(60)
    assert loads(world) == 1 and world.serving(M)


async def test_what_served_before_a_load_that_fails_is_loaded_again(world: World) -> None:
    await placed(world, ALONE)
    await asyncio.sleep(10)
    world.fail_loads(1)
    with pytest.raises(LoadFailed):
        await placed(world, PAIR)
    await world.until(lambda: world.serving(M), 10)
    [record] = world.leader().records
    assert (record.options, record.status) == (ALONE, "ready")


async def test_other_bounds_load_beside_an_answer_which_ends_where_it_runs(world: World) -> None:
    await placed(world, ALONE)
    answer = world.ask(M, 10)
    await asyncio.sleep(2)
    _ = await world.leader().place(M, PAIR)
    assert not answer.done() and len(world.serving(M)) == 2
    await answer
    await world.until(lambda: [len(nodes) for nodes in world.serving(M)] == [2])


async def test_a_removed_model_ends_its_answers_and_goes(world: World) -> None:
    await placed(world, ALONE)
    answer = world.ask(M, 50)
    await asyncio.sleep(2)
    [record] = world.leader().records
    await world.leader().remove(record.id)
    assert not answer.done() and world.serving(M)
    await answer
    await world.until(lambda: not world.processes())
    assert loads(world) == 1


async def test_a_node_drains_and_its_stage_moves_before_it_goes(world: World) -> None:
    await placed(world)
    answer = world.ask(M, 30)
    await asyncio.sleep(3)
    node = world.serving(M)[0][1]
    world.machines[node].draining = True
    await world.until(lambda: node not in [n for n, _, _ in world.processes()], 20)
    await answer
    assert node not in world.serving(M)[0]


async def test_a_whole_models_answers_end_on_the_node_that_drains(world: World) -> None:
    await placed(world, replace(ALONE, exclude=frozenset({NodeId("a")})))
    answer = world.ask(M, 30)
    await asyncio.sleep(3)
    [[node]] = world.serving(M)
    world.machines[node].draining = True
    await asyncio.sleep(10)
    assert len(world.serving(M)) == 2 and not answer.done()
    await answer
    await world.until(lambda: node not in world.serving(M)[0], 20)
    assert loads(world) == 2


def kinds(world: World, kind: str) -> list[str]:
    return [e.text for e in world.heads[NodeId("a")].events.entries() if e.kind == kind]


async def test_two_stages_on_one_node_part_once_the_third_node_is_back(world: World) -> None:
    await placed(world, TRIO)
    planned = world.serving(M)[0]
    await world.kill("c")
    await world.until(lambda: world.serving(M) and len(set(world.serving(M)[0])) == 2)
    world.start("c")
    answer = world.ask(M, 40)
    await asyncio.sleep(35)
    assert len(set(world.serving(M)[0])) == 2, "an answer runs"
    await answer
    done_at = world.now
    await world.until(lambda: world.serving(M) == [planned], 20)
    assert world.now - done_at > 10, "its next turn finds what was cached"
    await world.until(lambda: len(world.processes()) == 3, 5)
    assert loads(world) == 5
    record = world.leader().records[0]
    assert (record.moved, record.step, record.status) == ("", "", "ready")
    assert kinds(world, "replanned")[-1].startswith("m changed over: on ")
    before = list(world.calls)
    await asyncio.sleep(300)
    assert world.calls == before, "it rests"


async def test_no_stage_wanders_with_a_node_that_comes_and_goes(world: World) -> None:
    await placed(world, TRIO)
    before = loads(world)
    for _ in range(12):
        await world.kill("c")
        await asyncio.sleep(6)
        world.start("c")
        await asyncio.sleep(19)
    assert loads(world) - before <= 6, "in five minutes"
    await world.until(lambda: world.serving(M) and len(set(world.serving(M)[0])) == 3, 300)


async def test_an_answer_that_begins_while_a_stage_moves_is_not_cut(world: World) -> None:
    await placed(world, TRIO)
    await world.kill("c")
    await world.until(lambda: world.serving(M))
    world.start("c")
    await world.until(lambda: len(world.processes()) == 4)
    epochs = {process.epoch.number for _, _, process in world.processes() if process.epoch}
    await world.ask(M, 30)
    assert {p.epoch.number for _, _, p in world.processes() if p.epoch} == epochs
    await world.until(lambda: len(set(world.serving(M)[0])) == 3, 20)


async def test_the_next_head_reads_the_placement_from_its_runners(world: World) -> None:
    await placed(world, replace(PAIR, exclude=frozenset({NodeId("a")})))
    answer = world.ask(M, 30, "c")
    await asyncio.sleep(3)
    [record] = world.leader().records
    before = list(world.calls)
    await world.kill("a")
    await answer
    assert world.calls == before, "nothing was loaded, nothing unloaded"
    [adopted] = world.leader().records
    assert (adopted.id, adopted.options) == (record.id, record.options)
    assert "adopted" in [event.kind for event in world.heads[NodeId("b")].events.entries()]


async def test_the_next_head_replaces_the_stage_that_went_with_the_last_one(world: World) -> None:
    await placed(world)
    answer = world.ask(M, 30, "c")
    await asyncio.sleep(3)
    assert "a" in world.serving(M)[0]
    await world.kill("a")
    await answer
    assert len(world.processes()) == 2


async def test_the_head_dies_during_a_load(world: World) -> None:
    answer = world.ask(M, 5, "b")
    await asyncio.sleep(1)
    await world.kill("a")
    await answer
    await asyncio.sleep(10)
    assert len(world.serving(M)) == 1


async def test_a_request_before_the_next_head_heard_the_others_gets_the_nodes_that_it_names(
    world: World,
) -> None:
    """The last head has loaded the model elsewhere meanwhile."""
    on_a = PlanOptions(nodes=(NodeId("a"),), context=CONTEXT)
    first = asyncio.ensure_future(world.leader().place(M, on_a))
    await asyncio.sleep(1)
    await world.kill("a")
    await world.until(lambda: world.serving(M))
    with pytest.raises(HeadGone):
        await first
    world.start("a")
    placements = world.take_over("a")
    record = await placements.place(M, on_a)
    assert [stage.node for stage in record.stages] == ["a"]
    assert ["a"] in world.serving(M)


@pytest.mark.world(count=4)
async def test_replicas_are_known_to_the_next_head(world: World) -> None:
    elsewhere = replace(ALONE, exclude=frozenset({NodeId("a")}))
    await placed(world, elsewhere, replicas=2)
    await world.until(lambda: len(world.serving(M)) == 2)
    await world.kill("a")
    await world.until(lambda: world.leader().records, 20)
    before = list(world.calls)
    await asyncio.sleep(30)
    assert world.calls == before
    assert len(world.leader().records) == 2


@pytest.mark.world(count=4)
async def test_both_sides_of_a_partition_serve_and_one_placement_stays_after_it(
    world: World,
) -> None:
    await placed(world, ALONE)
    world.part("cd")
    there = world.ask(M, 60, "c")
    await asyncio.sleep(20)
    assert len(world.serving(M)) == 2
    world.part("")
    await there
    await world.until(lambda: len(world.serving(M)) == 1)


@pytest.mark.world(count=4)
async def test_what_was_requested_on_the_losing_side_holds_after_the_partition(
    world: World,
) -> None:
    world.part("cd")
    await asyncio.sleep(8)
    _ = await world.leader(NodeId("c")).place(N, PAIR)
    world.part("")
    await asyncio.sleep(60)
    assert world.serving(N) == [["c", "d"]]
