"""How many rows of a prompt one forward reads: as measured, as estimated, as memory allows."""

from dataclasses import replace

import cards
import pytest

from exo_node.placement.card import ModelCard
from exo_node.placement.chunk import CHUNK_S, LEAST, MOST
from exo_node.placement.cluster import OWN, ClusterView, NodeFacts
from exo_node.placement.ids import NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import plan

LAYERS = 8


def card(weights: int = 10**8, **changes: object) -> ModelCard:
    facts = {"hidden_size": 1024, "vocab_size": 1000, "num_key_value_heads": 8, "head_dim": 128}
    facts |= {"context_length": 32768, "weight_bytes": 2 * weights}
    return cards.card(LAYERS, **facts | changes)


def node(name: str = "a", seconds: float = 0.0, **changes: object) -> NodeFacts:
    """`seconds`: of one layer's chunk of MOST rows, where they were measured."""
    made = NodeFacts(NodeId(name), name, 10**12, 1e11, "cuda", prefill_s=seconds)
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def rows(model: ModelCard, *nodes: NodeFacts, **options: object) -> int:
    asked = replace(PlanOptions(min_nodes=len(nodes)), **options)  # pyright: ignore[reportArgumentType]
    return plan(model, ClusterView(nodes), asked).prefill_chunk


@pytest.mark.parametrize(("share", "expected"), [(0.99, MOST), (1.01, LEAST), (1000.0, LEAST)])
def test_a_chunk_takes_no_longer_than_others_may_wait(share: float, expected: int) -> None:
    assert rows(card(), node(seconds=share * CHUNK_S / LAYERS)) == expected


def test_the_slowest_stage_decides_for_the_pipeline() -> None:
    quick, slow = node("a", 0.5 * CHUNK_S / LAYERS), node("b", 3 * CHUNK_S / LAYERS)
    split = ((quick.id, 4), (slow.id, 4))
    assert rows(card(), quick, slow, layers=split) == MOST // 2
    assert rows(card(), quick, slow, layers=((quick.id, 6), (slow.id, 2))) == MOST


def test_what_nobody_measured_is_estimated_on_a_cpu_only() -> None:
    small, big = card(5 * 10**6), card(8 * 10**9)
    assert rows(big, node()) == MOST
    cpu = node(backend="cpu")
    assert (rows(small, cpu), rows(big, cpu)) == (LEAST, LEAST)
    own = replace(cpu, float32_products=OWN)
    assert (rows(small, own), rows(big, own)) == (MOST, LEAST)


def test_what_a_chunk_makes_fits_the_headroom() -> None:
    for hidden, expected in ((1024, MOST), (512, LEAST)):
        assert rows(card(hidden_size=hidden, context_length=1), node()) == expected
    assert rows(card(hidden_size=512), node()) == MOST, "a long context has more headroom"
