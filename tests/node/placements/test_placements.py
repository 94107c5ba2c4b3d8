"""Loads of one model follow one another, and a task nobody awaits is heard when it fails."""

import asyncio
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import leading

from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import background
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.head_watch import HeadWatch
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.stage_specs import StageSettings
from exo_node.node.placements.state import LiveNode
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.drafting import EnabledState
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.options import PlanOptions
from exo_node.placement.split_refusal import MAY_BE_SPLIT, SplitRefusal
from exo_node.proto import peer_pb2 as pb

DEMO = ModelId("demo")
NODE = NodeId("a" * 20)


class _Stages:
    """Loads take a few turns of the loop; `most` is the largest number there at once."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.most = 0

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        self.loaded.add(spec.placement)
        self.most = max(self.most, len(self.loaded))
        for _ in range(5):
            await asyncio.sleep(0)
        return pb.LoadReady(mtp_head="loaded")

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        self.loaded.discard(placement)

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        return pb.RunnerState()

    async def connect(
        self, stage: Endpoint, following: Endpoint, placement: PlacementId, epoch: pb.Epoch
    ) -> None:
        raise AssertionError("one stage has no neighbour")

    async def enter(
        self, stage: Endpoint, placement: PlacementId, number: int, epoch: pb.Epoch
    ) -> None:
        pass

    async def forget(self, stage: Endpoint) -> None:
        pass

    def near(self, stage: Endpoint) -> Endpoint:
        return stage


class _Facts:
    memory = 10**10

    def nodes(self) -> list[LiveNode]:
        return [LiveNode(NODE, self.memory)]

    def name(self, node: NodeId) -> str:
        return f"{node}'s name"

    def view(self, placing: ModelId) -> ClusterView:
        return ClusterView((NodeFacts(NODE, "n", self.memory, 10**10),))

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        await asyncio.sleep(0)
        return packaged_cards()[model], ""

    async def require_files(self, model: ModelId) -> None:
        """Every model is on some disk."""

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        return MAY_BE_SPLIT

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        return EnabledState(True)

    def stage_settings(self, generator: NodeId) -> StageSettings:
        return StageSettings()


class _Roomy(_Facts):
    memory = 10**12


async def test_requests_that_come_together_share_one_load() -> None:
    stages = _Stages()
    placements = leading(stages, _Facts())
    given = await asyncio.gather(*(placements.ensure(DEMO) for _ in range(8)))
    records = [each.record for each in given]
    assert {record.id for record in records} == {records[0].id}
    assert stages.loaded == {records[0].id}


async def test_placing_a_model_several_times_at_once_leaves_one_of_it() -> None:
    stages = _Stages()
    placements = leading(stages, _Facts())
    records = await asyncio.gather(*(placements.place(DEMO, PlanOptions()) for _ in range(4)))
    assert len({record.id for record in records}) == 1, "they want the same"
    assert stages.most == 1
    assert [record.id for record in placements.records] == list(stages.loaded)
    assert (await placements.ensure(DEMO)).record.id in stages.loaded


async def test_a_context_is_lengthened() -> None:
    stages = _Stages()
    placements = leading(stages, _Roomy())
    record = await placements.place(ModelId("Qwen/Qwen3.6-35B-A3B"), PlanOptions())
    assert record.plan.context_length == record.specs[0].context_length == 262_144
    assert not record.moved


class _TwoNodes(_Facts):
    heard_at = -math.inf

    def nodes(self) -> list[LiveNode]:
        return [*super().nodes(), LiveNode(NodeId("b"), self.memory, heard_at=self.heard_at)]


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


@pytest.mark.parametrize(("setting", "rows"), [(0, 0), (1, 4), (2, 4), (8, 8)])
def test_strict_rows_are_at_least_a_round_of_the_most_drafts(setting: int, rows: int) -> None:
    assert StageSettings(strict_rows=setting).rows_for(max_k=3) == rows
