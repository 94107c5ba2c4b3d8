"""Memory that a model was given and did not ask for goes to one that else would be refused."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from cards import card, stage_bytes
from clocks import Clock
from fakes import NODE, FakeFacts, FakeStages, leading

from exo_node.node.machine.timing import LAN
from exo_node.node.placements.loaded_placement import LoadedPlacement
from exo_node.node.placements.state import LiveNode
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import OWN, ClusterView, NodeFacts
from exo_node.placement.errors import InsufficientMemory
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.options import DEFAULT_CONTEXT, PlanOptions
from exo_node.placement.reasons import first_clause
from exo_node.proto import peer_pb2 as pb

MOST = 8 * DEFAULT_CONTEXT
FIRST, SECOND, THIRD = ModelId("first"), ModelId("second"), ModelId("third")
ALONE = PlanOptions(max_nodes=1)


def card_of(model: ModelId, context: int = MOST, weights: int = 10**9) -> ModelCard:
    facts = {"hidden_size": 64, "vocab_size": 1000, "head_dim": 64, "weight_bytes": weights}
    return card(8, id=model, context_length=context, **facts)


def whole(context: int, dtype: str = "bfloat16") -> int:
    model = card_of(FIRST).computed_in(dtype)
    return stage_bytes(model, 0, model.num_layers, True, context)


class OneMachine(FakeStages, FakeFacts):
    """A single node under the real planner, which may have products of float32."""

    def __init__(self, memory: int, products: str = "", context: int = MOST) -> None:
        super().__init__()
        self.memory, self.products, self.context = memory, products, context
        self.small = set[ModelId]()
        self.loads = 0
        self.clock = Clock()
        self.placements = leading(self, self, LAN, clock=self.clock)

    def nodes(self) -> list[LiveNode]:
        return [LiveNode(NODE, self.memory)]

    def view(self, placing: ModelId) -> ClusterView:
        node = NodeFacts(NODE, "n", self.memory, 10**10, "cpu", float32_products=self.products)
        return ClusterView((node,))

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        return card_of(model, self.context, 10**9 // (4 if model in self.small else 1)), ""

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        self.loads += 1
        return await super().load(node, spec, progress)

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        await asyncio.sleep(0)

    async def placed(self, model: ModelId, options: PlanOptions = ALONE) -> LoadedPlacement:
        """Two seconds later: it is not just given to a request any more."""
        record = await self.placements.place(model, options)
        self.clock.now += 2
        return record

    async def now(self, model: ModelId) -> LoadedPlacement:
        """The model's placement once it is ready."""
        async with asyncio.timeout(60):
            while (record := self.placements.of(model)) is None or record.status != "ready":
                await asyncio.sleep(0)
        promised = sum(runner.memory for runner in self.placements.runners)
        assert promised <= self.memory
        return record


async def test_a_lengthened_context_leaves_half_and_then_gives_way() -> None:
    """A second model of 32,768 tokens needs more than the half that the first one left."""
    machine = OneMachine(whole(MOST) + whole(DEFAULT_CONTEXT) * 9 // 10)
    first = await machine.placed(FIRST)
    long = first.plan.context_length
    assert long > DEFAULT_CONTEXT
    assert machine.memory - whole(long) < whole(DEFAULT_CONTEXT)
    second = await machine.placed(SECOND)
    smaller = await machine.now(FIRST)
    assert smaller is not first and smaller.plan.context_length == DEFAULT_CONTEXT
    assert second.plan.context_length >= DEFAULT_CONTEXT


async def test_float32_that_nobody_asked_for_gives_way() -> None:
    machine = OneMachine(whole(512, "float32") + whole(512) // 2, OWN, context=512)
    assert (await machine.placed(FIRST)).plan.dtype == "float32"
    assert (await machine.placed(SECOND)).plan.dtype == "bfloat16"
    first = await machine.now(FIRST)
    assert first.plan.dtype == "bfloat16"
    assert "another model needs the room" in first.plan.dtype_reason
    assert not first.options.frugal, "it may have more again at its next load"


@pytest.mark.parametrize("why", ["used", "just given", "asked for", "in vain"])
async def test_what_is_used_or_was_asked_for_stays_and_nothing_is_unloaded_in_vain(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    _ = caplog.set_level("INFO")
    memory = whole(MOST) + whole(8192)
    machine = OneMachine(memory if why != "in vain" else whole(MOST) + 1000)
    options = replace(ALONE, context=MOST) if why == "asked for" else ALONE
    first = await machine.placed(FIRST, options)
    if why == "used":
        _ = first.begin()
    if why == "just given":
        machine.placements.desired.touch(FIRST)
    if why == "in vain":
        with pytest.raises(InsufficientMemory):
            _ = await machine.placed(SECOND, replace(ALONE, context=MOST))
    else:
        second = (await machine.placed(SECOND)).plan
        assert second.context_length == 8192
        clause = f"with 8,192 of the model's {MOST:,} tokens of context"
        assert f"placed second in 0.0 s: {first_clause(second.reason)}" in caplog.text
        assert clause in first_clause(second.reason)
    assert await machine.now(FIRST) is first
    assert machine.loads == 1 + (why != "in vain")


async def test_a_context_is_not_shortened_for_want_of_what_idle_models_can_give() -> None:
    """The memory that the first one gives up is enough for the usual context."""
    machine = OneMachine(whole(MOST) + whole(8192))
    _ = await machine.placed(FIRST)
    assert (await machine.placed(SECOND)).plan.context_length >= DEFAULT_CONTEXT


async def test_a_requested_context_is_never_shortened() -> None:
    machine = OneMachine(whole(8192))
    with pytest.raises(InsufficientMemory, match=r"context = 8192"):
        _ = await machine.placed(FIRST, replace(ALONE, context=9000))
    assert (await machine.placed(FIRST)).plan.context_length == 8192


async def test_two_small_models_that_come_at_once_shrink_it_once() -> None:
    machine = OneMachine(whole(512, "float32") + whole(512) // 10, OWN, context=512)
    machine.small = {SECOND, THIRD}
    _ = await machine.placed(FIRST)
    both = await asyncio.gather(machine.placed(SECOND), machine.placed(THIRD))
    assert {record.plan.dtype for record in both} == {"bfloat16"}, "memory is short"
    assert (await machine.now(FIRST)).plan.dtype == "bfloat16"
    assert machine.loads == 4
