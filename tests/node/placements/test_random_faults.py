"""Random faults in virtual time over the real loop: they must leave order."""

import asyncio
import os
import random
from collections.abc import AsyncGenerator
from math import inf

import pytest
from cluster_world import CONTEXT, World, known_nodes
from test_stories import ALONE, PAIR, TRIO, M, N

from exo_node.node.machine.timing import LAN
from exo_node.placement.errors import InsufficientMemory, LoadFailed
from exo_node.placement.ids import ModelId
from exo_node.placement.options import PlanOptions

SEEDS = int(os.environ.get("EXO_FAULT_SEEDS", "100"))
FAULTS = (
    ["ask"] * 6
    + ["place"] * 3
    + ["kill", "crash", "hang", "fail", "drain", "split"]
    + ["start", "heal"] * 2
    + ["remove"]
)
CALM_S = 250.0
"""Longer than a pause, a drain and a load: what fits must serve by then."""


async def fault(world: World, chance: random.Random, *, partitions: bool) -> None:
    """One of them; some do nothing in some states."""
    up = [machine for machine in world.machines.values() if machine.up]
    one = chance.choice(list(world.machines.values()))
    model = chance.choice([M, N])
    leader = world.leader(chance.choice(up).id)
    processes = world.processes()
    match chance.choice(FAULTS):
        case "ask":
            _ = world.ask(model, chance.choice([1.0, 5.0, 40.0]), chance.choice(up).id)
        case "place" if leader.leading.is_set():
            options = chance.choice([ALONE, PAIR, TRIO, PlanOptions(context=CONTEXT)])
            replicas, auto = chance.choice([1, 1, 2]), chance.random() < 0.25
            placing = leader.place(model, options, replicas, auto_replicas=auto)
            task = asyncio.ensure_future(placing)
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        case "remove" if leader.leading.is_set() and leader.records:
            record = chance.choice(leader.records)
            task = asyncio.ensure_future(leader.remove(record.id))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        case "kill" if len(up) > 1 and one.up:
            await world.kill(one.id)
        case "start":
            world.start(one.id)
        case "crash" if processes:
            node, (name, stage), _ = chance.choice(processes)
            world.crash(node, name, stage)
        case "hang" if processes:
            chance.choice(processes)[2].hangs = True
        case "fail":
            one.fails.append(LoadFailed("it broke"))
        case "drain" if len(up) > 1:
            one.draining = not one.draining
        case "split" if partitions:
            for machine in world.machines.values():
                machine.side = chance.randint(0, 1)
        case "heal":
            for machine in world.machines.values():
                machine.side = 0
        case _:
            pass


@pytest.fixture
def chance(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
async def world(chance: random.Random) -> AsyncGenerator[World]:
    async with known_nodes(chance.randint(2, 5), chance.choice([1.3, 2.2, 4.0])) as nodes:
        yield nodes


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_faults_leave_every_answer_ended_and_every_model_served(
    world: World, chance: random.Random, seed: int
) -> None:
    for _ in range(40):
        await fault(world, chance, partitions=seed % 2 == 1)
        await asyncio.sleep(chance.choice([0.5, 0.5, 1, 2, 5]))
    for machine in world.machines.values():
        machine.side, machine.draining, machine.fails = 0, False, []
        machine.up = True
    # A process that hangs with no answer on it is its node's to find.
    for node, (name, number), process in world.processes():
        if process.hangs:
            world.crash(node, name, number)
    await asyncio.sleep(CALM_S)
    assert not world.answers, story_of(world)
    leader = world.leader()
    for model, desired in leader.desired.models.items():
        if desired.used_at != -inf:
            await check_served(world, model)
    before = list(world.calls)
    await asyncio.sleep(130 + LAN.settle_after_s)
    assert len(world.calls) - len(before) <= 12, story_of(world)
    before = list(world.calls)
    await asyncio.sleep(100)
    assert world.calls == before, "it rests"


def story_of(world: World) -> str:
    """The state of all heads, for the message of a failure."""
    lines = [f"now {world.now}, answers {len(world.answers)}", *world.calls[-40:]]
    for head in world.heads.values():
        for record in head.placements.records:
            answers = dict(record.activity.answers)
            lines.append(f"{head.id}: {record.id} {record.card.id} {record.status} {answers}")
        lines += [f"  {runner.key} {runner.state}" for runner in head.placements.runners]
        lines += [f"  {event.kind}: {event.text}" for event in head.events.entries()[-12:]]
    return "\n".join(lines)


async def check_served(world: World, model: ModelId) -> None:
    """It is served, or a request for it is refused for want of room.

    One that was never ready and failed to load waits for a request.
    """
    head = world.head()
    assert head is not None
    failed = [e.text for e in head.events.entries() if e.kind == "load_failed"]
    if world.serving(model) or any(model in text and "it broke" in text for text in failed):
        return
    before = story_of(world)
    try:
        _ = await world.leader().ensure(model)
    except InsufficientMemory:
        return
    raise AssertionError(before)
