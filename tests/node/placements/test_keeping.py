"""How long models stay loaded without use, as the setting and requests have it."""

import asyncio
import math
from collections.abc import AsyncGenerator

import pytest
from clocks import Clock
from fakes import FakeFacts, FakeStages, leading

from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.claims import Claims
from exo_node.node.placements.placements import Placements
from exo_node.placement.errors import ModelNotFound
from exo_node.placement.ids import ModelId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.bounds import MAX_REAL

DEMO = ModelId("demo")


def placing(setting: float = math.inf) -> tuple[Placements, Claims, Clock]:
    """The placements of a node that leads; each pass follows a change of the clock."""
    clock, facts, events = Clock(), FakeFacts(), EventLog()
    placements = leading(FakeStages(), facts, LOCAL, events, keep_alive_s=setting, clock=clock)
    return placements, Claims(placements, facts, events, LOCAL), clock


def left_s(placements: Placements) -> float:
    """Until the model is unloaded."""
    [record] = placements.records
    return placements.desired.left_s(DEMO, in_use=record.activity.requests > 0)


async def claimed(claims: Claims, **fields: object) -> AsyncGenerator[pb.AcquireEvent, None]:
    request = pb.AcquireRequest(model=DEMO, request="r", **fields)  # pyright: ignore[reportArgumentType]
    async for event in claims.acquire(request):
        yield event
        if event.WhichOneof("event") == "placed":
            return


async def test_a_model_is_left_its_stay_from_its_last_use() -> None:
    placements, _, clock = placing(60)
    record = (await placements.ensure(DEMO)).record
    clock.now += 59
    assert left_s(placements) == pytest.approx(1)
    placements.desired.touch(DEMO)
    clock.now += 59
    assert left_s(placements) == pytest.approx(1)
    epoch = record.begin()
    assert left_s(placements) == 60
    placements.end(record, epoch)
    assert left_s(placements) == 60
    await placements.close()


@pytest.mark.parametrize("setting", [60.0, math.inf])
@pytest.mark.parametrize("forever", [math.inf, MAX_REAL])
async def test_a_request_goes_before_the_setting(setting: float, forever: float) -> None:
    placements, _, clock = placing(setting)
    _ = await placements.ensure(DEMO)
    placements.desired.extend_stay(DEMO, 5.0, trusted=True)
    clock.now += 4
    assert left_s(placements) == pytest.approx(1)
    placements.desired.extend_stay(DEMO, forever, trusted=True)
    clock.now += 10**9
    assert left_s(placements) == math.inf
    await placements.close()


async def test_claims_say_how_long_the_model_stays_and_the_last_word_counts() -> None:
    placements, claims, _ = placing()
    for keep_alive_s, expected_s in ((None, None), (5.0, 5.0), (None, 5.0), (MAX_REAL, MAX_REAL)):
        fields = (
            {"trusted": True}
            if keep_alive_s is None
            else {"trusted": True, "keep_alive_s": keep_alive_s}
        )
        _ = [event async for event in claimed(claims, **fields)]
        assert placements.desired.models[DEMO].keep_alive_s == expected_s
    _ = [event async for event in claimed(claims, release=True)]
    assert placements.desired.models[DEMO].keep_alive_s == 0
    await placements.close()


@pytest.mark.parametrize(
    ("setting", "before", "keep_alive_s", "expected_s"),
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
    setting: float, before: float | None, keep_alive_s: float, expected_s: float | None
) -> None:
    placements, claims, _ = placing(setting)
    _ = await placements.ensure(DEMO)
    placements.desired.change(DEMO, keep_alive_s=before)
    _ = [event async for event in claimed(claims, keep_alive_s=keep_alive_s)]
    assert placements.desired.models[DEMO].keep_alive_s == expected_s
    await placements.close()


async def test_to_release_a_model_loads_nothing_and_names_one_that_nobody_knows() -> None:
    placements, claims, _ = placing()
    _ = [event async for event in claimed(claims, release=True)]
    assert placements.records == []
    unknown = pb.AcquireRequest(model="nobody/knows", request="r", release=True)
    with pytest.raises(ModelNotFound):
        _ = [event async for event in claims.acquire(unknown)]


async def test_a_model_that_is_loaded_again_has_the_setting_for_its_stay() -> None:
    placements, claims, clock = placing(60)
    _ = [event async for event in claimed(claims, trusted=True, keep_alive_s=0.0)]
    async with asyncio.timeout(60):
        while placements.records:
            clock.now += 0.5
            placements.look()
            await asyncio.sleep(0)
    _ = await placements.ensure(DEMO)
    assert left_s(placements) == 60
    await placements.close()
