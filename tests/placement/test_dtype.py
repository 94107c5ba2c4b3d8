"""The dtype that a placement computes in: asked for, needed, or the fastest that fits."""

import re
from dataclasses import replace

import cards
import pytest
from cards import stage_bytes

from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import OWN, ClusterView, LayerProfile, NodeFacts
from exo_node.placement.fitting import fit
from exo_node.placement.ids import NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import Placement, plan, planned_bytes, preview

MB = 10**6


def card(**changes: object) -> ModelCard:
    facts = {"hidden_size": 64, "vocab_size": 1000, "num_key_value_heads": 2, "head_dim": 64}
    facts |= {"context_length": 1000, "weight_bytes": 100 * MB}
    return cards.card(8, **facts | changes)


def cpu(name: str, memory: int = 10**9, **changes: object) -> NodeFacts:
    node = NodeFacts(NodeId(name), name, memory, 40e9, "cpu", "Xeon", float32_products=OWN)
    return replace(node, **changes)  # pyright: ignore[reportArgumentType]


def mac(name: str, chip: str = "Apple M4", memory: int = 10**9, **changes: object) -> NodeFacts:
    node = NodeFacts(NodeId(name), name, memory, 100e9, "metal", chip)
    return replace(node, **changes)  # pyright: ignore[reportArgumentType]


def placed(model: ModelCard, *nodes: NodeFacts, **options: object) -> Placement:
    return plan(model, ClusterView(nodes), replace(PlanOptions(), **options))  # pyright: ignore[reportArgumentType]


def need(model: ModelCard, *, dtype: str) -> int:
    """Of one node, as it is known of a card of that dtype with that many bytes of weights."""
    size = model.weight_bytes * (2 if dtype == "float32" else 1)
    own = model.model_copy(update={"dtype": dtype, "weight_bytes": size})
    return stage_bytes(own, 0, model.num_layers, True, model.context_length, False)


PLAIN, EXPERTS, FOUR_BIT = card(), card(num_experts=4), card(quantization=4)
OLD = "Apple M1 Pro"


@pytest.mark.parametrize(
    ("model", "nodes", "dtype", "reason"),
    [
        (PLAIN, [cpu("a")], "float32", "own products"),
        (card(dtype="float16"), [cpu("a")], "float32", "own products"),
        (PLAIN, [cpu("a", float32_products="no compiler")], "bfloat16", "a has no fast.*no compil"),
        (PLAIN, [cpu("a", float32_products="")], "bfloat16", "^the checkpoint's own$"),
        (PLAIN, [cpu("a", dtype="bfloat16")], "bfloat16", "--dtype bfloat16"),
        (PLAIN, [cpu("a", dtype="float16")], "float16", "--dtype float16"),
        (PLAIN, [mac("a", dtype="float32")], "float32", "--dtype float32"),
        (PLAIN, [mac("a")], "bfloat16", "^the checkpoint's own$"),
        (PLAIN, [mac("a", OLD)], "float16", "no bfloat16"),
        (card(dtype="float32"), [mac("a", OLD)], "float32", "^the checkpoint's own$"),
        (EXPERTS, [cpu("a", float32_products="")], "float32", "experts in float32 only"),
        (FOUR_BIT, [cpu("a", float32_products="")], "float32", "float32 scales"),
        (EXPERTS, [mac("a")], "bfloat16", "^the checkpoint's own$"),
        (PLAIN, [mac("a"), cpu("b")], "bfloat16", "a has a GPU, and all stages"),
        (PLAIN, [mac("a", OLD), cpu("b")], "float16", "no bfloat16"),
        (PLAIN, [mac("a"), mac("b", OLD)], "float16", "b has an Apple M1 Pro, .* no bfloat16"),
        (PLAIN, [mac("a", OLD), mac("b")], "float16", "a has an Apple M1 Pro, .* no bfloat16"),
        (PLAIN, [cpu("a"), cpu("b")], "float32", "own products"),
        (PLAIN, [cpu("a"), cpu("b", float32_products="none")], "bfloat16", "b has no fast"),
        (EXPERTS, [mac("a"), cpu("b", float32_products="")], "float32", "b computes on a CPU"),
    ],
)
def test_what_is_asked_for_wins_then_what_a_node_needs_then_what_is_fast(
    model: ModelCard, nodes: list[NodeFacts], dtype: str, reason: str
) -> None:
    result = placed(model, *nodes, min_nodes=len(nodes))
    assert (result.dtype, len(result.stages)) == (dtype, len(nodes))
    assert re.search(reason, result.dtype_reason)
    plain = result.dtype_reason == "the checkpoint's own"
    assert ("computes in" in result.reason) is not plain


def test_the_generators_operator_decides_for_the_whole_pipeline() -> None:
    nodes = [mac("a", dtype="float32"), cpu("b", dtype="bfloat16")]
    for first, dtype in (("a", "float32"), ("b", "bfloat16")):
        order = sorted(nodes, key=lambda node: node.id != first)
        result = placed(PLAIN, *nodes, layers=tuple((node.id, 4) for node in order))
        assert result.dtype == dtype


def test_float32_is_taken_while_it_fits_to_the_byte_and_counted_in_full() -> None:
    wide, narrow = need(PLAIN, dtype="float32"), need(PLAIN, dtype="bfloat16")
    fits = placed(PLAIN, cpu("a", wide))
    assert fits.dtype == "float32"
    assert planned_bytes(PLAIN, fits, 0) == wide
    short = placed(PLAIN, cpu("a", wide - 1))
    assert short.dtype == "bfloat16"
    assert planned_bytes(PLAIN, short, 0) == narrow
    assert "float32, which is faster there, needs 0.25 GB, and a has 0.24 GB" in short.reason


def test_float32_costs_no_more_nodes() -> None:
    wide = need(PLAIN, dtype="float32")
    nodes = [cpu("a", wide * 2 // 3), cpu("b", wide * 2 // 3)]
    alone = placed(PLAIN, *nodes)
    assert (alone.dtype, len(alone.stages)) == ("bfloat16", 1)
    assert placed(PLAIN, *nodes, min_nodes=2).dtype == "float32"
    assert placed(PLAIN, *nodes, cpu("c", wide)).stages[0].node == "c"
    assert placed(PLAIN, *nodes, cpu("c", wide), nodes=(NodeId("a"),)).dtype == "bfloat16"


def test_beside_a_mac_without_room_a_cpu_is_as_fast_as_alone() -> None:
    result = preview(PLAIN, ClusterView((mac("a", memory=1), cpu("b"))))
    assert result.best.dtype == "float32"
    assert result.runner_up is None


def test_sixteen_bits_are_looked_for_where_they_can_be_computed() -> None:
    """Of nodes that hold 60 % each, the quickest pairs have the CPU, and may not be."""
    size = need(EXPERTS, dtype="bfloat16") * 6 // 10
    quick = cpu("c", size, memory_bandwidth=900e9)
    result = placed(EXPERTS, mac("a", memory=size), mac("b", memory=size), quick)
    assert (result.dtype, {stage.node for stage in result.stages}) == ("bfloat16", {"a", "b"})


def test_a_node_that_cannot_compute_in_sixteen_bits_is_no_place_for_them() -> None:
    """Experts on the Mac alone, since with the CPU's help they would need float32."""
    quick = mac("a", memory_bandwidth=400e9)
    result = placed(EXPERTS, quick, cpu("b"))
    assert (result.dtype, [stage.node for stage in result.stages]) == ("bfloat16", ["a"])


def test_times_that_were_measured_in_another_dtype_do_not_count() -> None:
    slow = LayerProfile(decode_s=1.0, tail_s=1.0)
    for dtype, measured in (("bfloat16", False), ("float32", True)):
        result = placed(PLAIN, cpu("a", profile=slow, profile_dtype=dtype))
        assert result.dtype == "float32"
        assert (result.score > 1) is measured
    assert placed(PLAIN, mac("a", OLD, profile=slow, profile_dtype="float16")).score > 1


def test_the_search_weighs_nodes_by_times_that_were_measured_in_sixteen_bits() -> None:
    slow = LayerProfile(decode_s=1.0, tail_s=1.0)
    size = need(PLAIN, dtype="bfloat16") * 6 // 10
    measured = mac("a", memory=size, profile=slow, profile_dtype="bfloat16")
    placement = placed(PLAIN, measured, mac("b", memory=size), mac("c", memory=size))
    assert {stage.node for stage in placement.stages} == {"b", "c"}


def test_scales_and_a_head_grow_with_the_dtype_and_quantised_numbers_do_not() -> None:
    weights = 16 * 10**6
    model = card(quantization=4, weight_bytes=weights * 9 // 16)
    assert model.computed_in("float32").weight_bytes == weights * 10 // 16
    head = card(quantization=4, native_mtp={"default_k": 1, "max_k": 1})
    wide = head.computed_in("float32")
    assert wide.mtp_bytes == pytest.approx(2 * head.mtp_bytes, rel=1e-3)
    body = head.weight_bytes - head.mtp_bytes
    assert wide.weight_bytes - wide.mtp_bytes == pytest.approx(body * 10 / 9, rel=1e-3)
    fp8 = card(fp8=True)
    assert fp8.computed_in("float32").memory_bytes == 2 * fp8.memory_bytes
    assert PLAIN.computed_in("float32").kv_bytes_per_layer_token == 2 * 2 * 2 * 64 * 2


def test_lists_of_models_say_the_dtype_and_count_it() -> None:
    verdict = fit(PLAIN, ClusterView((cpu("a"),)))
    assert (verdict.dtype, verdict.needed_bytes) == ("float32", need(PLAIN, dtype="float32"))
    assert "own products" in verdict.dtype_reason
    assert fit(PLAIN, ClusterView((cpu("a", 1),))).dtype == ""


def test_a_cluster_of_such_cpus_is_proven_by_float32_alone() -> None:
    result = preview(PLAIN, ClusterView((cpu("a"), cpu("b"))))
    assert (result.best.dtype, result.bound_s) == ("float32", result.best.score)
    assert result.runner_up is not None and result.runner_up.dtype == "float32"
