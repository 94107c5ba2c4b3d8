"""Messages while placements lose stages, and refusals: over the real loop."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from cluster_world import World
from test_stories import ALONE
from test_stories import TRIO as THREE

from exo_node.node.placements.claims import Claims
from exo_node.node.placements.loaded_placement import LoadedPlacement
from exo_node.node.placements.waiting_requests import Assignment
from exo_node.placement.errors import LoadFailed
from exo_node.placement.ids import ModelId, NodeId
from exo_node.proto import peer_pb2 as pb

DEMO = ModelId("demo")
A, B, C, D = (NodeId(letter) for letter in "abcd")

pytestmark = pytest.mark.world(count=4)
SOON = "the next one is about to be loaded"


def events(world: World, kind: str) -> list[str]:
    return [event.text for event in world.heads[A].events.entries() if event.kind == kind]


def lose(world: World, record: LoadedPlacement, stage: int) -> NodeId:
    """The stage's runner ends, and its node says so."""
    node = record.stages[stage].node
    world.crash(node, record.id, stage)
    return node


async def ready(world: World, record: LoadedPlacement) -> None:
    await asyncio.sleep(0.1)
    await world.until(lambda: record.status == "ready")


async def test_a_loss_and_what_followed_are_events_and_said_of_the_placement(world: World) -> None:
    record = await world.leader().place(DEMO, THREE)
    assert events(world, "placed")[0].startswith("placed demo in 2.0 s: ")
    before = [stage.node for stage in record.stages]
    await world.kill(before[1])
    await asyncio.sleep(4)
    assert record.status == "restoring"
    [lost] = events(world, "stage_lost")
    assert lost.startswith(f"demo lost its layers on {before[1]}'s name: ")
    await ready(world, record)
    now = record.stages[1].node
    moved = f"{now}'s name has the layers of {before[1]}'s name, which was lost"
    assert record.moved == moved
    assert events(world, "replanned")[0].startswith("demo answers again after 2.0")
    assert events(world, "replanned")[0].endswith(f" s: {moved}")
    assert [s.node for s in record.stages] == [before[0], now, before[2]]


@pytest.mark.world(count=3)
async def test_fewer_nodes_than_requested_are_said_of_the_placement(world: World) -> None:
    record = await world.leader().place(DEMO, THREE)
    for node in (C, B):
        await world.kill(node)
    await asyncio.sleep(9)
    for stage in range(3):
        _ = lose(world, record, stage)
    await world.until(lambda: (r := world.leader().of(DEMO)) is not None and r is not record)
    again = world.leader().of(DEMO)
    assert again is not None
    await ready(world, again)
    assert again.moved == "fewer nodes are here than were asked for"


@pytest.mark.world(count=3)
async def test_a_claim_that_waits_for_a_pause_is_told_why(world: World) -> None:
    head = world.heads[A]
    record = await world.leader().place(DEMO, THREE)
    claims = Claims(world.leader(), head, head.events, world.timing)
    for again in (False, True):
        _ = lose(world, record, 1)
        await world.until(lambda: record.status == "restoring")
        await asyncio.sleep(0.1)
        if not again:
            await ready(world, record)
    async with aclosing(claims.acquire(pb.AcquireRequest(model=DEMO))) as waiting:
        steps = [(await anext(waiting)).waiting.step for _ in range(2)]
    pause = "its runner ended on the other node; loaded again in 1 s, after losses in a row"
    assert events(world, "stage_lost")[-1] == f"demo: {pause}"
    assert steps[1] == f"loading the lost layers on {record.stages[1].node}'s name"


async def test_a_model_whose_copies_are_all_lost_is_placed_again_at_once(world: World) -> None:
    """Each node has a pause of its own: the losses of two copies are not those of one stage."""
    _ = await world.leader().place(DEMO, ALONE, replicas=2)
    for _ in range(5):
        await world.until(lambda: len(world.serving(DEMO)) == 2)
        answer = world.ask(DEMO, 60)
        await asyncio.sleep(3)
        start = world.now
        for node, (name, stage), _ in world.processes():
            world.crash(node, name, stage)
        await asyncio.sleep(0.1)
        await world.until(lambda: world.serving(DEMO))
        assert world.now - start < 4
        _ = answer.cancel()


async def test_a_placement_without_a_stage_is_handed_out_once_it_is_restored(world: World) -> None:
    head = world.heads[A]
    record = await world.leader().place(DEMO, THREE)
    claims = Claims(world.leader(), head, head.events, world.timing)
    ensure = world.leader().ensure
    losses = [0, 2]

    async def lose_after(model: ModelId, prefixes: object = None) -> Assignment:
        """A stage is lost after the placement was given, before its answer begins."""
        assignment = await ensure(model)
        if losses:
            _ = lose(world, assignment.record, losses.pop())
        return assignment

    world.leader().ensure = lose_after
    event = pb.AcquireEvent()
    async with aclosing(claims.acquire(pb.AcquireRequest(model=DEMO))) as events:
        async for event in events:
            if event.HasField("placed"):
                break
    assert not losses and len(event.placed.stages) == 3
    assert not record.activity.given_at

    _ = lose(world, record, 0)
    await asyncio.sleep(0.1)
    async with aclosing(claims.acquire(pb.AcquireRequest(holding=record.id))) as events:
        event = await anext(events)
        assert event.waiting.step == "restoring", "claimed again at a head that adopted a part"
        assert record.activity.requests == 1


@pytest.mark.world(count=1)
async def test_losses_of_one_stage_wait_ever_longer_and_are_never_given_up(world: World) -> None:
    record = await world.leader().place(DEMO, ALONE)
    waits: list[float] = []
    for _ in range(9):
        start = world.now
        [(node, (name, stage), _)] = world.processes()
        world.crash(node, name, stage)
        await asyncio.sleep(0.1)
        await world.until(lambda: world.serving(DEMO))
        waits.append(world.now - start - 2.1)
    pauses = [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert all(0 <= waited - pause <= 2 for waited, pause in zip(waits, pauses, strict=True))
    record = (await world.leader().ensure(DEMO)).record
    world.leader().succeeded(record)
    start = world.now
    _ = lose(world, record, 0)
    await asyncio.sleep(0.1)
    await world.until(lambda: world.serving(DEMO))
    assert world.now - start < 4, "an answer was good"


@pytest.mark.world(count=1)
async def test_a_person_who_unloads_or_loads_a_model_waits_for_no_pause(world: World) -> None:
    for again in (True, False):
        record = await world.leader().place(DEMO, ALONE)
        for _ in range(6):
            _ = lose(world, record, 0)
            await asyncio.sleep(0.1)
            await world.until(lambda: world.serving(DEMO) or "again in 8" in str(
                [r.step for r in world.leader().records]))  # fmt: skip
            record = world.leader().records[0]
        assert record.status == "restoring"
        start = world.now
        if again:
            _ = await world.leader().place(DEMO, ALONE)
        else:
            await world.leader().remove(record.id)
            assert world.leader().records == []
        assert world.now - start < 3


@pytest.mark.world(count=1)
async def test_one_that_never_loaded_says_when_it_may_be_tried_again(world: World) -> None:
    world.machines[A].fails = [LoadFailed("cannot load")] * 9
    for _ in range(2):
        with pytest.raises(LoadFailed, match="cannot load"):
            _ = await world.leader().ensure(DEMO)
    with pytest.raises(LoadFailed, match=r"2 times in a row: .* A request in 1 s tries it"):
        _ = await world.leader().ensure(DEMO)
    [record] = world.leader().records
    assert (record.status, record.error) == ("failed", "cannot load")
    assert "demo could not be placed: cannot load" in events(world, "load_failed")
    world.machines[A].fails = []
    assert (await world.leader().place(DEMO, ALONE)).status == "ready"


@pytest.mark.world(count=1)
async def test_who_waits_for_a_model_that_worked_waits_through_loads_that_fail(
    world: World,
) -> None:
    record = await world.leader().place(DEMO, ALONE)
    world.machines[A].fails = [LoadFailed("cannot load")] * 3
    _ = lose(world, record, 0)
    assignments = await asyncio.gather(*(world.leader().ensure(DEMO) for _ in range(3)))
    placed = [each.record for each in assignments]
    assert placed[0] is placed[1] is placed[2]
    world.machines[A].fails = [LoadFailed("cannot load")] * 99
    _ = lose(world, placed[0], 0)
    with pytest.raises(LoadFailed, match="cannot load"):
        _ = await world.leader().ensure(DEMO)
    world.machines[A].fails = []
    await world.until(lambda: world.serving(DEMO))


@pytest.mark.world(count=1)
async def test_a_replica_that_no_node_has_room_for_is_missing_with_a_reason(world: World) -> None:
    here = replace(ALONE, exclude=frozenset({B, C, D}))
    _ = await world.leader().place(DEMO, here, replicas=2)
    await asyncio.sleep(2)
    assert len(world.leader().records) == 1
    missing = world.leader().missing_replica(DEMO)
    assert missing == "for a second no node is left"
    _ = await world.leader().place(DEMO, here)
    assert world.leader().missing_replica(DEMO) == ""


async def test_a_replica_that_could_not_be_loaded_is_missing_with_its_error_and_tried_again(
    world: World,
) -> None:
    for node in (B, C, D):
        world.machines[node].fails = [LoadFailed("cannot load")]
    here = replace(ALONE, exclude=frozenset({C, D}))
    _ = await world.leader().place(DEMO, here, replicas=2)
    await asyncio.sleep(5)
    assert "cannot load" in world.leader().missing_replica(DEMO)
    await world.until(lambda: len(world.serving(DEMO)) == 2, 30)
    assert world.leader().missing_replica(DEMO) == ""


async def test_a_copy_that_loads_is_said_to_load_beside_what_is_missing(world: World) -> None:
    here = replace(ALONE, exclude=frozenset({C, D}))
    record = await world.leader().place(DEMO, here, replicas=3)
    other = next(node for node in (A, B) if node != record.stages[0].node)
    await world.until(lambda: world.leader().missing_replica(DEMO) != SOON)
    missing = world.leader().missing_replica(DEMO)
    assert missing == f"one loads on {other}'s name; for a third no node is left"
    await world.until(lambda: len(world.serving(DEMO)) == 2)
    assert world.leader().missing_replica(DEMO) == "for a third no node is left"


async def test_a_first_copy_that_loads_is_what_the_others_wait_for(world: World) -> None:
    placing = asyncio.create_task(world.leader().place(DEMO, ALONE, replicas=2))
    await world.until(lambda: bool(world.leader().missing_replica(DEMO)))
    missing = world.leader().missing_replica(DEMO)
    assert missing.startswith("one loads on ")
    assert missing.endswith("; the others load once it answers")
    _ = await placing


async def test_the_layers_of_a_lost_node_are_said_to_load_on_their_new_one(world: World) -> None:
    record = await world.leader().place(DEMO, THREE)
    lost = record.stages[1].node
    await world.kill(lost)
    await world.until(lambda: bool(record.restoring_step(str)))
    free = {A, B, C, D} - {stage.node for stage in record.stages} - {lost}
    step = record.restoring_step(str)
    assert step.startswith("loading the lost layers on ")
    assert step.rsplit(" ", 1)[1] in {*free, *(s.node for s in record.stages)} - {lost}
    await ready(world, record)
    assert record.restoring_step(str) == ""


async def test_an_old_heartbeat_brings_no_ended_runner_back(world: World) -> None:
    """The reports of a node that was killed stay as they were until it counts as dead."""
    record = await world.leader().place(DEMO, replace(ALONE, exclude=frozenset({A})))
    await asyncio.sleep(1)
    lost_node = record.stages[0].node
    await world.kill(lost_node)
    world.leader().actions.note_broken(record.id, record.epoch, "it broke off", [0])
    await asyncio.sleep(10)
    losses = [e for e in world.heads[A].events.entries() if e.kind == "stage_lost"]
    assert len(losses) == 1
    assert world.serving(DEMO) != [[lost_node]]


@pytest.mark.parametrize("lost_stages", [[1], []])
@pytest.mark.parametrize("wait_s", [0.5, 1.0, 1.9])
async def test_late_reports_of_a_loss_leave_the_runner_that_replaces_it_alone(
    world: World, lost_stages: list[int], wait_s: float
) -> None:
    """Each answer of a placement reports, the last one perhaps when the next runner loads."""
    record = await world.leader().place(DEMO, THREE)
    epoch, lost = record.epoch, record.stages[1].node
    await world.kill(lost)
    await world.until(lambda: bool(record.restoring_step(str)))
    await asyncio.sleep(wait_s)
    [loading] = [runner for runner in record.owners.values() if runner.state == "loading"]
    for _ in range(3):
        world.leader().actions.note_broken(record.id, epoch, "stage 1 is gone", lost_stages)
        await asyncio.sleep(0.01)
    await world.until(lambda: record.status == "ready")
    assert record.owners[1].key == loading.key
    assert record.owners[1].since == loading.since
    assert len(events(world, "stage_lost")) == 1


async def test_the_kernels_of_a_placement_follow_its_stages(world: World) -> None:
    record = await world.leader().place(DEMO, THREE)
    before = record.kernels()
    assert len(before) == 2 + 16
    record.endpoints[1].ready.kernels.append("cpu_product")
    assert record.kernels() != before, "where other kernels compute, so do other numbers"
    rows = f"{record.plan.prefill_chunk} rows"
    assert rows in before, "other forwards over a prompt may round otherwise"
