import math
from dataclasses import replace

import cards
import pytest
from cards import MTP, stage_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import (
    ClusterView,
    LayerProfile,
    LinkFacts,
    NodeFacts,
    StageAssignment,
)
from exo_node.placement.cost import (
    ASSUMED_MTP_SPEEDUP,
    HEADROOM,
    SERIALISATION_S,
    mtp_speedup,
    seconds_per_token,
)
from exo_node.placement.ids import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LAYER, ENDS = 10_000, 2 * 100 * 64 * 2  # bytes: a layer; embeddings and lm_head, untied
KV = 2 * 2 * 16 * 2  # bytes of one token in one layer


def card(**changes: object) -> ModelCard:
    facts = {"hidden_size": 64, "vocab_size": 100, "num_attention_layers": 2, "head_dim": 16}
    facts |= {"num_key_value_heads": 2, "weight_bytes": ENDS + 8 * LAYER}
    return cards.card(8, **facts | changes)


def mtp_card() -> ModelCard:
    fusion = 2 * 64 * 64 * 2
    mtp = {"num_layers": 1, "default_k": 1, "max_k": 3}
    return card(native_mtp=mtp, weight_bytes=ENDS + 9 * LAYER + fusion)


@pytest.mark.parametrize("context", [0, 500])
def test_a_latent_cache_and_fp8_weights_need_what_they_take_in_memory(context: int) -> None:
    latent = card(kv_row_width=20, fp8=True)
    need = 2 * 8 * LAYER + ENDS + 2 * context * 20 * 2
    assert stage_bytes(latent, 0, 8, True, context, False) == with_headroom(need)
    reads = seconds_per_token(latent, [StageAssignment(A, 0, 8)], view())
    assert reads == pytest.approx((2 * 8 * LAYER + ENDS / 2) / 1e9)


def with_headroom(need: int) -> int:
    return -(-need * 12 // 10)


@pytest.mark.parametrize(
    ("first", "end", "generator", "context", "need"),
    [
        (0, 8, False, 0, 8 * LAYER),
        (0, 8, True, 0, 8 * LAYER + ENDS),
        (0, 8, True, 500, 8 * LAYER + ENDS + 2 * 500 * KV),
        (0, 3, False, 500, 3 * LAYER),  # layers 3 and 7 hold the caches
        (0, 4, False, 500, 4 * LAYER + 500 * KV),
        (4, 7, False, 500, 3 * LAYER),
        (7, 8, False, 500, LAYER + 500 * KV),
    ],
)
def test_a_stage_needs_layers_ends_and_kv_and_a_fifth_more(
    first: int, end: int, generator: bool, context: int, need: int
) -> None:
    assert stage_bytes(card(), first, end, generator, context, False) == with_headroom(need)


def test_mtp_adds_the_heads_weights_and_kv_to_the_generator_alone() -> None:
    model = mtp_card()
    plain = 8 * LAYER + ENDS + 2 * 500 * KV
    head = LAYER + 2 * 64 * 64 * 2 + 500 * KV
    assert stage_bytes(model, 0, 8, True, 500, True) == with_headroom(plain + head)
    assert stage_bytes(model, 0, 8, True, 500, False) == with_headroom(plain)
    assert stage_bytes(model, 0, 8, False, 500, True) == with_headroom(plain - ENDS)
    assert stage_bytes(card(), 0, 8, True, 500, True) == with_headroom(plain)


@settings(deadline=None)
@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 2000))
def test_stages_sum_to_the_model_and_grow_with_their_layers(
    a: int, b: int, c: int, context: int
) -> None:
    first, middle, end = sorted((a, b, c))

    def need(start: int, stop: int) -> int:
        return stage_bytes(card(), start, stop, False, context, False)

    assert 0 <= need(first, middle) + need(middle, end) - need(first, end) <= 1  # rounding
    assert max(need(first, middle), need(middle, end)) <= need(first, end)


def node(id: NodeId, bandwidth: float) -> NodeFacts:
    return NodeFacts(id, id, 10**9, bandwidth)


def view(*links: LinkFacts) -> ClusterView:
    return ClusterView((node(A, 1e9), node(B, 5e8), node(C, 0)), links)


def test_one_node_reads_its_layers_and_lm_head_and_hops_nowhere() -> None:
    whole = [StageAssignment(A, 0, 8)]
    assert seconds_per_token(card(), whole, view()) == pytest.approx((8 * LAYER + ENDS / 2) / 1e9)


def test_a_pipeline_adds_every_hop_and_the_way_back() -> None:
    stages = [StageAssignment(A, 0, 6), StageAssignment(B, 6, 8)]
    link = LinkFacts(B, A, round_trip_s=2e-3, bandwidth=1e6)
    compute = (6 * LAYER + ENDS / 2) / 1e9 + 2 * LAYER / 5e8
    hop = 1e-3 + 64 * 2 / 1e6 + SERIALISATION_S
    assert seconds_per_token(card(), stages, view(link)) == pytest.approx(compute + 2 * hop)


def test_of_two_links_the_quicker_carries_the_hidden() -> None:
    stages = [StageAssignment(A, 0, 6), StageAssignment(B, 6, 8)]
    wifi, cable = LinkFacts(A, B, 5e-3, 1e7), LinkFacts(B, A, 3e-4, 1e9)
    both = seconds_per_token(card(), stages, view(wifi, cable))
    assert both == seconds_per_token(card(), stages, view(cable, wifi))
    assert both == seconds_per_token(card(), stages, view(cable))
    assert both < seconds_per_token(card(), stages, view(wifi))


def test_what_was_not_measured_is_assumed_slow_and_never_divides_by_zero() -> None:
    unmeasured = [StageAssignment(C, 0, 8)]
    expected = (8 * LAYER + ENDS / 2) / 50e9
    assert seconds_per_token(card(), unmeasured, view()) == pytest.approx(expected)
    both = [StageAssignment(A, 0, 4), StageAssignment(B, 4, 8)]
    for hostile in (float("nan"), float("inf"), -1.0, 0.0, 1e-320):
        link = LinkFacts(A, B, hostile, hostile)
        nodes = (replace(node(A, hostile), profile=LayerProfile(hostile)), node(B, -1.0))
        assert 0 < seconds_per_token(card(), both, ClusterView(nodes, (link,))) < math.inf


def test_what_was_measured_of_the_model_counts_before_bandwidth() -> None:
    measured = replace(node(A, 1e9), profile=LayerProfile(decode_s=2e-3, tail_s=5e-3))
    seconds = seconds_per_token(card(), [StageAssignment(A, 0, 8)], ClusterView((measured,)))
    assert seconds == pytest.approx(8 * 2e-3 + 5e-3)


def profile_of(verify_s: float, rows: int) -> LayerProfile:
    return LayerProfile(1e-3, verify_s, tail_s=1e-3, verify_rows=rows)


@pytest.mark.parametrize(
    ("profile", "speedup"),
    [
        (None, ASSUMED_MTP_SPEEDUP),
        (LayerProfile(1e-3), ASSUMED_MTP_SPEEDUP),
        (LayerProfile(1e-3, mtp_speedup=1.7), 1.7),
        (LayerProfile(1e-3, mtp_speedup=99.0), 4.0),  # three drafts: four tokens a round
        (LayerProfile(1e-3, mtp_speedup=0.6), 1.0),  # adaptive K drafts none there
        # The best round, K = 2: a verify of 8 layers and a tail, with 3 of the 4 rows that were
        # timed, and two drafts of a layer and a tail; 2.19 tokens. Plain: 8 layers and a tail.
        (profile_of(1.1e-3, 4), 2.19 * 9 / (8 * (1 + 0.2 / 3) + 1 + 4)),
        (profile_of(4e-3, 4), 1.0),
        # A single row that was timed while the machine was busy: more rows take no less.
        (profile_of(1e-5, 4), 2.533 * 9 / 15),
        # One that was kept from a time when the card's max_k was 1.
        (profile_of(1.1e-3, 2), 2.19 * 9 / (8 * 1.2 + 1 + 4)),
        (profile_of(1.1e-3, 1), ASSUMED_MTP_SPEEDUP),
        (profile_of(1.1e-3, 0), ASSUMED_MTP_SPEEDUP),
    ],
)
def test_native_mtp_counts_as_measured_else_as_assumed(
    profile: LayerProfile | None, speedup: float
) -> None:
    there = replace(node(A, 1e9), profile=profile)
    assert mtp_speedup(mtp_card(), there) == pytest.approx(speedup)
    assert mtp_speedup(card(), there) == 1.0
    assert mtp_speedup(mtp_card(), replace(there, drafts=False)) == 1.0


def test_a_moe_reads_its_chosen_experts_only() -> None:
    dense = card(weight_bytes=ENDS + 8 * 100_000)
    moe = card(
        weight_bytes=ENDS + 8 * 100_000,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=60,
    )
    saved = 8 * 3 * (3 * 64 * 60 * 2) / 1e9  # three experts of four in each of eight layers
    stages = [StageAssignment(A, 0, 8)]
    assert seconds_per_token(moe, stages, view()) == pytest.approx(
        seconds_per_token(dense, stages, view()) - saved
    )
    assert stage_bytes(moe, 0, 8, True, 0, False) == stage_bytes(dense, 0, 8, True, 0, False)


def test_a_stage_on_an_unknown_node_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="gone"):
        seconds_per_token(card(), [StageAssignment(NodeId("gone"), 0, 8)], view())


def test_a_named_drafter_is_counted_beside_the_head() -> None:
    sizes = {"weight_bytes": 500_000, "cached_numbers": 100}
    plain = cards.card(8, native_mtp=MTP)
    drafted = cards.card(8, native_mtp=MTP, drafter={"model": "a/drafter", **sizes})
    without = stage_bytes(drafted, 0, 8, True, 1000)
    assert without == stage_bytes(plain, 0, 8, True, 1000)
    over, under = HEADROOM
    need = stage_bytes(drafted, 0, 8, True, 1000, mtp=True)
    head = stage_bytes(plain, 0, 8, True, 1000, mtp=True)
    assert need - head == pytest.approx((500_000 + 1000 * 100 * 2) * over / under, abs=1)
    assert head > without
    wide, own = drafted.computed_in("float32"), plain.computed_in("float32")
    assert wide.draft_bytes - own.draft_bytes == 1_000_000
    assert wide.draft_bytes_per_token - own.draft_bytes_per_token == 400
