"""Promises of memory: what loads at once never overcommits, and no failure leaves a promise."""

import asyncio
import random
from collections.abc import Callable

import pytest

from exo_node.node.cluster.member import MemberFacts
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.memory_ledger import left, promised
from exo_node.node.placements.placements import Endpoint, Placements, StageSettings
from exo_node.node.placements.planner_view import node_facts
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.cost import stage_bytes
from exo_node.placement.drafting import EnabledState
from exo_node.placement.errors import ExoNodeError, InsufficientMemory, LoadFailed
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.plan import PlanOptions
from exo_node.placement.split_refusal import MAY_BE_SPLIT, SplitRefusal
from exo_node.proto import peer_pb2 as pb

CARD = packaged_cards()[ModelId("demo")]
NODES = (NodeId("a" * 20), NodeId("b" * 20))
MODELS = [ModelId(f"model-{i}") for i in range(5)]
CONTEXT = PlanOptions(context=512)


def card_of(model: ModelId) -> ModelCard:
    return CARD.model_copy(update={"id": model})


WHOLE = stage_bytes(card_of(MODELS[0]), 0, CARD.num_layers, True, 512, True)


class Machines:
    """`Stages` and `Facts` of two nodes whose heartbeats tell nothing; loads may fail or hang."""

    def __init__(self, memory: int, seed: int, failing: float = 0.0) -> None:
        self.memory = memory
        self.random = random.Random(seed)
        self.failing = failing
        self.holds: set[tuple[NodeId, str, int]] = set()
        self.placements = Placements(self, self, LOCAL.placements)

    def view(self, placing: ModelId) -> ClusterView:
        nodes: list[NodeFacts] = []
        for node in NODES:
            of_node = dict(promised(self.placements.records).get(node, {}))
            assert sum(of_node.values()) <= self.memory, "overcommitted"
            _ = of_node.pop(placing, None)
            nodes.append(NodeFacts(node, node[:1], left(self.memory, of_node, {}), 10**10))
        return ClusterView(tuple(nodes))

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)
        if self.random.random() < self.failing:
            raise LoadFailed("as asked")
        self.holds.add((node, spec.placement, spec.stage))
        return pb.LoadReady(mtp_head="loaded")

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        await asyncio.sleep(0)
        self.holds.discard((node, placement, stage))

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        return pb.RunnerState()

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        pass

    def near(self, stage: Endpoint) -> Endpoint:
        return stage

    async def forget(self, stage: Endpoint) -> None:
        pass

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        await asyncio.sleep(0)
        return card_of(model), ""

    async def require_files(self, model: ModelId) -> None:
        """Every model is on some disk."""

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        return MAY_BE_SPLIT

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        return EnabledState(True)

    def stage_settings(self, generator: NodeId) -> StageSettings:
        return StageSettings()

    def check(self) -> None:
        """What is promised is what the placements that stand hold, and no more than there is."""
        promises = promised(self.placements.records)
        for node in NODES:
            assert sum(promises.get(node, {}).values()) <= self.memory
            here = {m for m, size in promises.get(node, {}).items() if size}
            records = self.placements.records
            held = {r.card.id for r in records if any(k[:2] == (node, r.id) for k in self.holds)}
            assert here == held


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_models_that_load_at_once_are_as_many_as_fit(room: int) -> None:
    machines = Machines(WHOLE * room + WHOLE // 4, seed=room)
    alone = PlanOptions(context=512, max_nodes=1)
    works = (machines.placements.place(model, alone) for model in MODELS)
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    placed = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(placed) == min(2 * room, len(MODELS))
    assert all(isinstance(o, InsufficientMemory) for o in outcomes if o not in placed)
    machines.check()


@pytest.mark.parametrize("seed", range(12))
async def test_no_sequence_leaves_a_promise_behind(seed: int) -> None:
    """Place, fail, cancel, lose, remove in any order and at once."""
    machines = Machines(WHOLE * 2 + WHOLE // 4, seed, failing=0.2)
    placements, chance = machines.placements, machines.random
    works: set[asyncio.Task[object]] = set()
    for _ in range(120):
        model = chance.choice(MODELS)
        records = [r for r in placements.records if r.card.id == model]
        match chance.randrange(6):
            case 0 | 1:
                spares = chance.randrange(2)
                options = PlanOptions(context=512, min_nodes=chance.choice([1, 1, 2]))
                works.add(asyncio.create_task(placements.place(model, options, spares)))
            case 2:
                works.add(asyncio.create_task(placements.ensure(model)))
            case 3 if works:
                _ = chance.choice(list(works)).cancel()
            case 4 if records:
                works.add(asyncio.create_task(placements.remove(records[0].id)))
            case 5 if records:
                placements.lost(records[0].id, 0, "as asked")
            case _:
                pass
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        _ = machines.view(model)
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for one in outcomes:
        assert isinstance(one, ExoNodeError | asyncio.CancelledError) or not isinstance(
            one, BaseException
        ), repr(one)
    while restoring := [r.restoring for r in placements.records if r.restoring is not None]:
        _ = await asyncio.wait(restoring)
    promises = promised(placements.records)
    ready = {r.card.id for r in placements.records if r.status == "ready"}
    assert {model for of_node in promises.values() for model in of_node} == ready
    for record in placements.records:
        if record.status == "ready":
            await placements.remove(record.id)
    assert not any(promised(placements.records).values())
    await placements.close()


def test_a_model_takes_what_it_was_promised_or_what_it_uses() -> None:
    a, b = MODELS[:2]
    assert left(100, {a: 30}, {}) == 70
    assert left(100, {a: 30}, {a: 10}) == 70
    assert left(100, {a: 30}, {a: 50}) == 50
    assert left(100, {a: 30}, {b: 50}) == 20
    assert left(100, {a: 90}, {b: 50}) == 0


def test_a_view_subtracts_promises_of_other_models_only() -> None:
    loading = pb.StageState(model=MODELS[0], weight_bytes=0)
    member = MemberFacts(pb.NodeFacts(id=NODES[0], memory_bytes=100), [loading])
    promises = {MODELS[0]: 60, MODELS[1]: 10}
    assert node_facts(member, MODELS[0], promises).memory_bytes == 90
    assert node_facts(member, MODELS[2], promises).memory_bytes == 30
    assert node_facts(member, MODELS[2]).memory_bytes == 100
