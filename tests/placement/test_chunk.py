"""How many rows of a prompt one forward reads: the model and the backends decide, nothing else."""

from dataclasses import replace

import cards
import pytest

from exo_node.placement.card import ModelCard
from exo_node.placement.chunk import LEAST, MOST
from exo_node.placement.cluster import OWN, ClusterView, LayerProfile, NodeFacts
from exo_node.placement.ids import NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import plan

LAYERS = 8


def card(weights: int = 10**8, **changes: object) -> ModelCard:
    facts = {"hidden_size": 1024, "vocab_size": 1000, "num_key_value_heads": 8, "head_dim": 128}
    facts |= {"context_length": 32768, "weight_bytes": 2 * weights}
    return cards.card(LAYERS, **facts | changes)


def node(name: str = "a", **changes: object) -> NodeFacts:
    facts = NodeFacts(NodeId(name), name, 10**12, 1e11, "cuda")
    return replace(facts, **changes)  # pyright: ignore[reportArgumentType]


def rows(model: ModelCard, *nodes: NodeFacts, **options: object) -> int:
    asked = replace(PlanOptions(min_nodes=len(nodes)), **options)  # pyright: ignore[reportArgumentType]
    return plan(model, ClusterView(nodes), asked).prefill_chunk


SMALL, BIG = card(5 * 10**6), card(8 * 10**9)


@pytest.mark.parametrize("backend", ["cuda", "metal", "cpu"])
@pytest.mark.parametrize("model", [SMALL, BIG], ids=["small", "big"])
def test_no_measurement_split_room_or_option_changes_a_chunk(
    model: ModelCard, backend: str
) -> None:
    one, other = node(backend=backend), node("b", backend=backend)
    expected = rows(model, one)
    for seconds in (1e-9, 1e-3, 60.0):
        times = LayerProfile(seconds, seconds, seconds, seconds, 3.0)
        measured = {"profile": times, "prefill_s": seconds, "profile_dtype": "bfloat16"}
        assert rows(model, replace(one, **measured)) == expected
        assert rows(model, replace(one, **measured), other) == expected
    for first in range(1, LAYERS):
        split = ((one.id, first), (other.id, LAYERS - first))
        assert rows(model, one, other, layers=split) == expected
    for context in (1, 4096, 32768):
        assert rows(model, one, context=context) == expected
        assert rows(model, one, other, context=context) == expected
    tight = model.weight_bytes * 3 // 2
    assert rows(model, replace(one, memory_bytes=tight), context=1) == expected
    assert rows(card(hidden_size=512, context_length=1), one) == rows(card(hidden_size=512), one)


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_a_gpu_reads_in_the_longest_chunks(backend: str) -> None:
    assert rows(BIG, node(backend=backend)) == MOST
    assert rows(BIG, node(backend=backend), node("b")) == MOST


@pytest.mark.parametrize("products", ["", OWN])
def test_a_cpu_reads_a_slow_model_in_short_chunks(products: str) -> None:
    cpu = node(backend="cpu", float32_products=products, dtype="float32")
    assert [rows(model, cpu) for model in (SMALL, BIG)] == [MOST, LEAST]
    in_16_bits = replace(cpu, dtype="bfloat16")
    assert rows(SMALL, in_16_bits) == LEAST, "MLX's products"
    assert rows(BIG, cpu, node("b")) == rows(BIG, node("b"), cpu) == LEAST, "one node is enough"
