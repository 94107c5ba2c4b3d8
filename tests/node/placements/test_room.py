"""What a model was given and did not ask for goes to one that else would be refused."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from test_memory_ledger import Machines

from exo_node.node.placements.loaded_placement import LoadedPlacement
from exo_node.placement.card import ModelCard, parse_card
from exo_node.placement.cluster import OWN, ClusterView
from exo_node.placement.cost import stage_bytes
from exo_node.placement.errors import InsufficientMemory
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import DEFAULT_CONTEXT, PlanOptions
from exo_node.proto import peer_pb2 as pb

MOST = 8 * DEFAULT_CONTEXT
FIRST, SECOND, THIRD = ModelId("first"), ModelId("second"), ModelId("third")
ALONE = PlanOptions(max_nodes=1, exclude=frozenset())


def card_of(model: ModelId, context: int = MOST, weights: int = 10**9) -> ModelCard:
    facts = {
        "id": model,
        "model_type": "llama",
        "num_layers": 8,
        "hidden_size": 64,
        "vocab_size": 1000,
        "num_attention_layers": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "context_length": context,
        "weight_bytes": weights,
    }
    return parse_card(facts, "test.toml")


def whole(context: int, dtype: str = "bfloat16") -> int:
    card = card_of(FIRST).computed_in(dtype)
    return stage_bytes(card, 0, card.num_layers, True, context, False)


class OneMachine(Machines):
    """A single node, which may have products of float32."""

    def __init__(self, memory: int, products: str = "", context: int = MOST) -> None:
        super().__init__(memory, seed=1)
        self.products, self.context = products, context
        self.small = set[ModelId]()
        self.loads = 0

    def view(self, placing: ModelId) -> ClusterView:
        [node, *_] = super().view(placing).nodes
        return ClusterView((replace(node, backend="cpu", float32_products=self.products),))

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        return card_of(model, self.context, 10**9 // (4 if model in self.small else 1)), ""

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        self.loads += 1
        return await super().load(node, spec, progress)

    async def placed(self, model: ModelId, options: PlanOptions = ALONE) -> LoadedPlacement:
        return await self.placements.place(model, options)

    def now(self, model: ModelId) -> LoadedPlacement:
        record = self.placements.of(model)
        assert record is not None
        assert record.status == "ready"
        return record


async def test_a_lengthened_context_leaves_half_and_then_gives_way() -> None:
    """A second model of 32,768 tokens needs more than the half that the first one left."""
    machines = OneMachine(whole(MOST) + whole(DEFAULT_CONTEXT) * 9 // 10)
    first = await machines.placed(FIRST)
    long = first.plan.context_length
    assert long > DEFAULT_CONTEXT
    assert machines.memory - whole(long) < whole(DEFAULT_CONTEXT)
    second = await machines.placed(SECOND)
    assert machines.now(FIRST).plan.context_length == DEFAULT_CONTEXT
    assert machines.now(FIRST) is not first
    assert second.plan.context_length >= DEFAULT_CONTEXT
    machines.check()


async def test_float32_that_nobody_asked_for_gives_way() -> None:
    machines = OneMachine(whole(512, "float32") + whole(512) // 2, OWN, context=512)
    assert (await machines.placed(FIRST)).plan.dtype == "float32"
    second = await machines.placed(SECOND)
    assert second.plan.dtype == "bfloat16"
    first = machines.now(FIRST)
    assert first.plan.dtype == "bfloat16"
    assert "another model needs the room" in first.plan.dtype_reason
    assert not first.desired.options.frugal, "it may have more again at its next load"
    machines.check()


@pytest.mark.parametrize("why", ["used", "just given", "asked for", "in vain"])
async def test_what_is_used_or_was_asked_for_stays_and_nothing_is_unloaded_in_vain(
    why: str,
) -> None:
    memory = whole(MOST) + whole(DEFAULT_CONTEXT) * 9 // 10
    machines = OneMachine(memory if why != "in vain" else whole(MOST) + 1000)
    asked = replace(ALONE, context=MOST) if why == "asked for" else ALONE
    first = await machines.placed(FIRST, asked)
    if why == "used":
        first.activity.begin()
    if why == "just given":
        machines.placements.keeping.touch(first)
    too_much = replace(ALONE, context=MOST) if why == "in vain" else ALONE
    with pytest.raises(InsufficientMemory):
        await machines.placed(SECOND, too_much)
    assert machines.now(FIRST) is first


async def test_two_small_models_that_come_at_once_shrink_it_once() -> None:
    machines = OneMachine(whole(512, "float32") + whole(512) // 10, OWN, context=512)
    machines.small = {SECOND, THIRD}
    _ = await machines.placed(FIRST)
    loads = machines.loads
    both = await asyncio.gather(machines.placed(SECOND), machines.placed(THIRD))
    assert {record.plan.dtype for record in both} == {"bfloat16"}, "memory is short"
    assert machines.now(FIRST).plan.dtype == "bfloat16"
    assert machines.loads == loads + 3
    machines.check()
