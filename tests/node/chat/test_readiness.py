"""Readiness is a step that was made, lately or now, and no process that merely lives."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from fakes import FakeFacts, FakeGenerators, FakeStages

from exo_node.node.chat.readiness import Readiness
from exo_node.node.machine.timing import LAN, LOCAL, ChatTiming
from exo_node.node.placements.maintenance import may_settle
from exo_node.node.placements.placements import Placements
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import ModelId
from exo_node.placement.plan import PlanOptions
from exo_node.proto import peer_pb2 as pb

TOKEN = pb.GenerateEvent(delta=pb.Delta(round=pb.Round(tokens=[1])))


@dataclass
class Asked:
    placements: Placements
    generators: FakeGenerators
    readiness: Readiness
    now: float = 100.0


def play(
    scenario: Callable[[Asked], Awaitable[None]],
    events: Sequence[pb.GenerateEvent] = (),
    fault: Exception | None = None,
    *,
    ends: bool = False,
    timing: ChatTiming = LOCAL.chat,
) -> None:
    async def run() -> None:
        placements = Placements(FakeStages(), FakeFacts(), LOCAL.placements)
        generators = FakeGenerators(events=events, fault=fault, ends=ends)
        asked = Asked(placements, generators, Readiness(placements, generators, timing))
        asked.readiness = Readiness(placements, generators, timing, lambda: asked.now)
        await scenario(asked)
        await placements.close()

    asyncio.run(run())


async def loaded(asked: Asked) -> None:
    _ = await asked.placements.place(ModelId("demo"), PlanOptions())


def test_a_model_that_worked_lately_is_asked_for_nothing() -> None:
    async def scenario(asked: Asked) -> None:
        await loaded(asked)
        asked.placements.records[0].activity.stepped_at = asked.now - LOCAL.chat.recent_s + 1
        assert await asked.readiness.fault() == ""
        assert asked.generators.requests == []

    play(scenario)


def test_one_that_rested_is_asked_for_a_token_and_then_has_worked() -> None:
    async def scenario(asked: Asked) -> None:
        await loaded(asked)
        for _ in range(2):
            assert await asked.readiness.fault() == ""
        assert [(r.max_tokens, r.num_draft_tokens) for r in asked.generators.requests] == [(1, 0)]
        asked.now += LOCAL.chat.recent_s
        assert await asked.readiness.fault() == ""
        assert len(asked.generators.requests) == 2

    play(scenario, [TOKEN], ends=True)


def test_probes_do_not_keep_a_moved_placement_where_it_is() -> None:
    """A load balancer that asks every twenty seconds is no work."""

    async def scenario(asked: Asked) -> None:
        await loaded(asked)
        record = asked.placements.records[0]
        record.moved = "a stage was lost"
        record.activity.stepped_at = record.moved_at = asked.now
        looks = 0
        while asked.now < 100.0 + LAN.placements.settle_after_s + 1:
            asked.now += 20.0
            assert await asked.readiness.fault() == ""
            looks += may_settle(record, LAN.placements, lambda: asked.now)
        assert asked.generators.requests  # it was asked, and gave its token
        assert looks == 1

    play(scenario, [TOKEN], ends=True)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(PeerLost("the runner is gone"), "the runner is gone"), (None, "no token within")],
)
def test_one_that_gives_none_is_not_ready_and_says_why(fault: Exception | None, said: str) -> None:
    async def scenario(asked: Asked) -> None:
        await loaded(asked)
        assert said in await asked.readiness.fault()
        assert asked.placements.records[0].activity.requests == 0

    play(scenario, fault=fault, timing=replace(LOCAL.chat, probe_within_s=0.05))


def test_one_that_is_being_restored_is_not_ready_however_lately_it_worked() -> None:
    async def scenario(asked: Asked) -> None:
        await loaded(asked)
        record = asked.placements.records[0]
        record.activity.stepped_at = asked.now
        record.load.lose("it broke")
        assert await asked.readiness.fault() == "demo is restoring: it broke"

    play(scenario)


def test_a_node_without_a_model_has_no_fault() -> None:
    async def scenario(asked: Asked) -> None:
        assert await asked.readiness.fault() == ""

    play(scenario)
