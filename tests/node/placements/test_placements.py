"""Loads of one model follow one another, and a task nobody awaits is heard when it fails."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import NODE, FakeFacts, FakeStages, leading

from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import background
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.head_watch import HeadWatch
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.state import LiveNode
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

DEMO = ModelId("demo")


@dataclass
class _Stages(FakeStages):
    """Loads take a few turns of the loop; `most` is the largest number there at once."""

    loaded: set[str] = field(default_factory=set[str])
    most: int = 0

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        self.loaded.add(spec.placement)
        self.most = max(self.most, len(self.loaded))
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().load(node, spec, progress)

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        self.loaded.discard(placement)


async def test_requests_that_come_together_share_one_load() -> None:
    stages = _Stages()
    placements = leading(stages, FakeFacts())
    assignments = await asyncio.gather(*(placements.ensure(DEMO) for _ in range(8)))
    records = [each.record for each in assignments]
    assert {record.id for record in records} == {records[0].id}
    assert stages.loaded == {records[0].id}


async def test_placing_a_model_several_times_at_once_leaves_one_of_it() -> None:
    stages = _Stages()
    placements = leading(stages, FakeFacts())
    records = await asyncio.gather(*(placements.place(DEMO, PlanOptions()) for _ in range(4)))
    assert len({record.id for record in records}) == 1, "they want the same"
    assert stages.most == 1
    assert [record.id for record in placements.records] == list(stages.loaded)
    assert (await placements.ensure(DEMO)).record.id in stages.loaded


async def test_a_context_is_lengthened() -> None:
    stages = _Stages()
    placements = leading(stages, FakeFacts())
    record = await placements.place(ModelId("Qwen/Qwen3.6-35B-A3B"), PlanOptions())
    assert record.plan.context_length == record.specs[0].context_length == 262_144
    assert not record.moved


@dataclass
class _TwoNodes(FakeFacts):
    heard_at: float = -math.inf

    def nodes(self) -> list[LiveNode]:
        return [*super().nodes(), LiveNode(NodeId("b"), 10**12, heard_at=self.heard_at)]


async def test_a_new_head_asks_the_others_once_and_leads_when_all_have_answered() -> None:
    calls: list[str] = []
    cluster: Any = SimpleNamespace(
        self_id=NODE,
        head=NODE,
        term=1,
        leads=None,
        send_heartbeats=lambda: calls.append("heartbeats"),
    )
    facts, desired, events = _TwoNodes(), DesiredPlacements(), EventLog()
    placements = Placements(_Stages(), facts, LOCAL, events, desired)
    watch = HeadWatch(cluster, placements, desired, events, LOCAL)
    for _ in range(3):
        await watch.look()
    assert calls == ["heartbeats"] and placements.is_taking_over
    facts.heard_at = math.inf
    await watch.look()
    assert placements.leading.is_set() and not placements.is_taking_over


def test_a_task_in_the_background_says_how_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("the reason")

    async def scenario() -> None:
        task = background(fail(), "the work")
        _ = await asyncio.wait([task])

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "the work ended by an error" in caplog.text
    assert "the reason" in caplog.text
