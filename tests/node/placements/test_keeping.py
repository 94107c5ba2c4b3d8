"""Idle models are unloaded when they were to be, and give way to others before that."""

import asyncio
import math
from collections.abc import AsyncGenerator

import pytest
from clocks import Clock
from fakes import FakeFacts, FakeStages
from test_memory_ledger import CONTEXT, MODELS, NODES, WHOLE, Machines

from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.claims import Claims
from exo_node.node.placements.handover import held_of, record_of
from exo_node.node.placements.keeping import Keeping
from exo_node.node.placements.loaded_placement import LoadedPlacement
from exo_node.node.placements.placements import Placements
from exo_node.placement.errors import InsufficientMemory, ModelNotFound
from exo_node.placement.ids import ModelId
from exo_node.placement.plan import PlanOptions
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.bounds import MAX_REAL

DEMO = ModelId("demo")


def keeping(clock: Clock, keep_alive_s: float = 60) -> Keeping:
    return Keeping(keep_alive_s, 1.0, clock)


async def loaded() -> LoadedPlacement:
    return await Placements(FakeStages(), FakeFacts(), LOCAL.placements).ensure(DEMO)


async def test_a_model_is_due_after_the_setting_from_its_last_use_and_not_while_it_is_used() -> (
    None
):
    clock, record = Clock(), await loaded()
    keeps = keeping(clock)
    keeps.touch(record)
    clock.now += 59
    assert keeps.due([record]) == []
    assert keeps.left_s(record) == pytest.approx(1)
    keeps.touch(record)
    clock.now += 59
    assert keeps.due([record]) == []
    clock.now += 1
    assert keeps.due([record]) == [record]
    record.activity.begin()
    assert keeps.due([record]) == []
    assert keeps.left_s(record) == 60
    record.activity.end()
    assert keeps.due([record]) == [record]


async def test_what_was_just_loaded_or_adopted_has_its_whole_time() -> None:
    clock, record = Clock(), await loaded()
    keeps = keeping(clock)
    record.activity.used_at = -math.inf
    assert keeps.due([record]) == []
    clock.now += 59
    assert keeps.due([record]) == []
    clock.now += 1
    assert keeps.due([record]) == [record]


@pytest.mark.parametrize("setting", [60.0, math.inf])
async def test_a_request_goes_before_the_setting(setting: float) -> None:
    clock, record = Clock(), await loaded()
    keeps = keeping(clock, setting)
    keeps.touch(record)
    for asked, after, due in ((0.0, 0.9, False), (0.0, 1.0, True), (5.0, 4.9, False)):
        record.activity.keep_alive_s = asked
        clock.now = record.activity.used_at + after
        assert keeps.due([record]) == ([record] if due else [])
    clock.now += 10**9
    for forever in (math.inf, MAX_REAL):
        record.activity.keep_alive_s = forever
        assert keeps.due([record]) == []
        assert keeps.left_s(record) == math.inf


class Cluster(Machines):
    """Two nodes with room for one model each, whose clock is the test's."""

    def __init__(self, keep_alive_s: float) -> None:
        super().__init__(int(1.1 * WHOLE), 0)
        self.clock = Clock()
        self.placements.keeping = keeping(self.clock, keep_alive_s)

    @property
    def models(self) -> list[str]:
        return sorted(record.card.id for record in self.placements.records)

    async def use(self, model: ModelId) -> LoadedPlacement:
        self.placements.keeping.touch(record := await self.placements.place(model, CONTEXT))
        return record


async def test_idle_models_are_unloaded_and_loaded_again_as_they_were_asked_for() -> None:
    cluster = Cluster(60)
    record = await cluster.placements.place(MODELS[0], PlanOptions(nodes=(NODES[1],), context=512))
    cluster.placements.tend()
    cluster.clock.now += 60
    cluster.placements.tend()
    async with asyncio.timeout(60):
        while cluster.holds:
            await asyncio.sleep(0)
    assert cluster.models == []
    again = await cluster.placements.ensure(MODELS[0])
    assert again.id != record.id
    assert again.generator.node == NODES[1]
    await cluster.placements.close()


async def test_an_idle_model_gives_way_where_another_has_no_room() -> None:
    cluster = Cluster(60)
    first, second = await cluster.use(MODELS[0]), await cluster.use(MODELS[1])
    cluster.clock.now += 2
    cluster.placements.keeping.touch(first)
    cluster.clock.now += 2
    _ = await cluster.use(MODELS[2])
    assert cluster.models == [MODELS[0], MODELS[2]], "the one used longest ago went"
    assert not any(placement == second.id for _, placement, _ in cluster.holds)


@pytest.mark.parametrize("why", ["for ever", "in use"])
async def test_a_model_stays_that_is_used_or_stays_for_ever(why: str) -> None:
    cluster = Cluster(60 if why == "in use" else math.inf)
    for model in MODELS[:2]:
        record = await cluster.use(model)
        if why == "in use":
            record.activity.begin()
    cluster.clock.now += 30
    with pytest.raises(InsufficientMemory):
        _ = await cluster.use(MODELS[2])
    assert cluster.models == MODELS[:2]


async def claimed(claims: Claims, **fields: object) -> AsyncGenerator[pb.AcquireEvent, None]:
    asked = pb.AcquireRequest(model=DEMO, request="r", **fields)  # pyright: ignore[reportArgumentType]
    async for event in claims.acquire(asked):
        yield event
        if event.WhichOneof("event") == "placed":
            return


async def test_claims_say_how_long_the_model_stays_and_the_last_word_counts() -> None:
    facts, events = FakeFacts(), EventLog()
    placements = Placements(FakeStages(), facts, LOCAL.placements, events)
    claims = Claims(placements, facts, events, LOCAL.placements, leads=True)
    for given, kept in ((None, None), (5.0, 5.0), (None, 5.0), (MAX_REAL, MAX_REAL)):
        fields = {"trusted": True} if given is None else {"trusted": True, "keep_alive_s": given}
        _ = [event async for event in claimed(claims, **fields)]
        (record,) = placements.records
        assert record.activity.keep_alive_s == kept
    _ = [event async for event in claimed(claims, release=True)]
    assert record.activity.keep_alive_s == 0
    await placements.close()


@pytest.mark.parametrize(
    ("setting", "before", "asked", "kept"),
    [
        (60, None, 0.0, None),
        (60, None, 0.0001, None),
        (60, None, MAX_REAL, None),
        (60, 5.0, MAX_REAL, 60),
        (60, 5.0, 30.0, 30),
        (60, 5.0, 1.0, 5),
        (60, 3600.0, 0.0, 3600),
        (60, MAX_REAL, 59.0, MAX_REAL),
        (math.inf, None, 0.0, None),
        (math.inf, 5.0, MAX_REAL, MAX_REAL),
        (0, None, MAX_REAL, None),
    ],
)
async def test_who_is_not_trusted_lengthens_a_stay_at_most_and_up_to_the_setting(
    setting: float, before: float | None, asked: float, kept: float | None
) -> None:
    facts, events = FakeFacts(), EventLog()
    placements = Placements(FakeStages(), facts, LOCAL.placements, events, keep_alive_s=setting)
    claims = Claims(placements, facts, events, LOCAL.placements, leads=True)
    record = await placements.ensure(DEMO)
    record.activity.keep_alive_s = before
    _ = [event async for event in claimed(claims, keep_alive_s=asked)]
    assert record.activity.keep_alive_s == kept
    await placements.close()


async def test_to_release_a_model_loads_nothing_and_names_one_that_nobody_knows() -> None:
    facts, events = FakeFacts(), EventLog()
    placements = Placements(FakeStages(), facts, LOCAL.placements, events)
    claims = Claims(placements, facts, events, LOCAL.placements, leads=True)
    _ = [event async for event in claimed(claims, release=True)]
    assert placements.records == []
    unknown = pb.AcquireRequest(model="nobody/knows", request="r", release=True)
    with pytest.raises(ModelNotFound):
        _ = [event async for event in claims.acquire(unknown)]


@pytest.mark.parametrize(("asked", "kept"), [(None, None), (5.0, 5.0), (math.inf, MAX_REAL)])
async def test_the_next_head_keeps_it_as_long(asked: float | None, kept: float | None) -> None:
    record = await loaded()
    record.activity.keep_alive_s = asked
    (held,) = held_of([record])
    found = record_of(held, record.card, lambda endpoint: endpoint)
    assert found is not None
    assert found.activity.keep_alive_s == kept
