"""Readiness is a step that was made, lately or now, and no process that merely lives."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from fakes import FakeFacts, FakeGenerators, FakeStages, leading

from exo_node.node.chat.readiness import Readiness
from exo_node.node.machine.timing import LOCAL, Timing
from exo_node.node.placements.placements import Placements
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import ModelId
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

TOKEN = pb.GenerateEvent(delta=pb.Delta(round=pb.Round(tokens=[1])))


@dataclass
class Setup:
    placements: Placements
    generators: FakeGenerators
    readiness: Readiness
    now: float = 100.0


@asynccontextmanager
async def world(
    events: Sequence[pb.GenerateEvent] = (),
    fault: Exception | None = None,
    *,
    ends: bool = False,
    timing: Timing = LOCAL,
    model: str = "demo",
) -> AsyncGenerator[Setup]:
    placements = leading(FakeStages(), FakeFacts())
    generators = FakeGenerators(events=events, fault=fault, ends=ends)
    setup = Setup(placements, generators, Readiness(placements, generators, timing))
    setup.readiness = Readiness(placements, generators, timing, lambda: setup.now)
    if model:
        _ = await placements.place(ModelId(model), PlanOptions())
    yield setup
    await placements.close()


async def test_a_model_that_worked_lately_is_asked_for_nothing() -> None:
    async with world() as setup:
        setup.placements.records[0].activity.stepped_at = setup.now - LOCAL.silence_s + 1
        assert await setup.readiness.fault() == ""
        assert setup.generators.requests == []


async def test_one_that_rested_is_asked_for_a_token_and_then_has_worked() -> None:
    async with world([TOKEN], ends=True) as setup:
        for _ in range(2):
            assert await setup.readiness.fault() == ""
        assert [
            (r.limits.max_tokens, r.drafting.num_draft_tokens) for r in setup.generators.requests
        ] == [(1, 0)]
        used_at = setup.placements.desired.models[ModelId("demo")].used_at
        setup.now += LOCAL.silence_s
        assert await setup.readiness.fault() == ""
        assert len(setup.generators.requests) == 2
        assert setup.placements.desired.models[ModelId("demo")].used_at == used_at, "it is no use"


async def test_an_embedder_that_rested_is_asked_for_an_embedding() -> None:
    event = pb.GenerateEvent(embedded=pb.Embedded(tokens=2))
    async with world([event], ends=True, model="Qwen/Qwen3-Embedding-0.6B") as setup:
        for _ in range(2):
            assert await setup.readiness.fault() == ""
        [request] = setup.generators.requests
        [inputs] = request.embeddings.inputs
        assert inputs.token_ids.ids == [0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(PeerLost("the runner is gone"), "the runner is gone"), (None, "no token within")],
)
async def test_one_that_gives_none_is_not_ready_and_says_why(
    fault: Exception | None, reason: str
) -> None:
    async with world(fault=fault, timing=replace(LOCAL, reply_s=0.05)) as setup:
        assert reason in await setup.readiness.fault()
        assert setup.placements.records[0].activity.requests == 0


async def test_one_that_is_being_restored_is_not_ready_however_lately_it_worked() -> None:
    async with world() as setup:
        record = setup.placements.records[0]
        record.activity.stepped_at = setup.now
        assert record.placement is not None
        record.placement, record.why = replace(record.placement, owners={}), "it broke"
        assert await setup.readiness.fault() == "demo is restoring: it broke"


async def test_a_node_without_a_model_has_no_fault() -> None:
    async with world(model="") as setup:
        assert await setup.readiness.fault() == ""
