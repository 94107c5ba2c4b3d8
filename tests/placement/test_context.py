"""How long the context of a placement is for which nobody asked for one."""

from dataclasses import replace

import pytest
from cards import MTP, card, stage_bytes
from hypothesis import given
from hypothesis import strategies as st

from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.context import LEAST, STEP
from exo_node.placement.errors import InsufficientMemory
from exo_node.placement.fitting import fit
from exo_node.placement.ids import NodeId
from exo_node.placement.options import DEFAULT_CONTEXT, PlanOptions
from exo_node.placement.plan import Placement, plan
from exo_node.placement.reasons import first_clause

MOST = 262_144


def cluster(*memory: int) -> ClusterView:
    """Nodes a, b, c …, equally fast."""
    ids = [NodeId(chr(ord("a") + i)) for i in range(len(memory))]
    return ClusterView(
        tuple(NodeFacts(id, id, size, 1e9) for id, size in zip(ids, memory, strict=True))
    )


LONG = card(context_length=MOST)


def bytes_of(model: ModelCard, context: int, *, mtp: bool = False) -> int:
    return stage_bytes(model, 0, model.num_layers, True, context, mtp)


def leaving(context: int, model: ModelCard = LONG, *, mtp: bool = False) -> int:
    """Memory of which `context` tokens take just half of what the base leaves."""
    base = bytes_of(model, DEFAULT_CONTEXT, mtp=mtp)
    return base + 2 * (bytes_of(model, context, mtp=mtp) - base)


def test_the_models_whole_context_is_taken_where_half_of_the_rest_holds_it() -> None:
    result = plan(LONG, cluster(leaving(MOST)))
    assert result.context_length == MOST
    room = f"; there is room for the model's whole context of {MOST:,} tokens"
    assert result.reason.endswith(room)
    assert f"{DEFAULT_CONTEXT:,} tokens of context and headroom" in result.reason
    short = plan(LONG, cluster(leaving(MOST) - 2))
    assert short.context_length == MOST - STEP
    assert f"a context of {MOST - STEP:,} of the model's {MOST:,} tokens: more" in short.reason


def test_where_nothing_is_left_it_stays_as_it_was_planned() -> None:
    result = plan(LONG, cluster(bytes_of(LONG, DEFAULT_CONTEXT)))
    assert result.context_length == DEFAULT_CONTEXT
    assert f"{DEFAULT_CONTEXT:,} of the model's {MOST:,} tokens" in result.reason


def test_what_was_asked_for_stays() -> None:
    for context in (1000, DEFAULT_CONTEXT, 100_000):
        result = plan(LONG, cluster(10**10), PlanOptions(context=context))
        assert result.context_length == context
        assert "there is room" not in result.reason


def test_a_short_context_is_not_spoken_of() -> None:
    result = plan(card(context_length=4096), cluster(10**9))
    assert result.context_length == 4096
    assert "whole context" not in result.reason


@pytest.mark.parametrize("most", [MOST, DEFAULT_CONTEXT, 20_000])
def test_a_context_that_fits_nowhere_is_shortened(most: int) -> None:
    model = card(context_length=most)
    result = plan(model, cluster(bytes_of(model, 12_288)))
    assert result.context_length == 12_288
    clause = f", with 12,288 of the model's {most:,} tokens of context for lack of memory"
    assert first_clause(result.reason).endswith(clause)
    assert "there is room" not in result.reason
    least = plan(model, cluster(bytes_of(model, LEAST)))
    assert least.context_length == LEAST


def test_below_the_least_a_refusal_names_the_context_that_fits() -> None:
    for room, context in ((bytes_of(LONG, LEAST) - 1, 2048), (bytes_of(LONG, 512), 512)):
        with pytest.raises(InsufficientMemory, match=rf"\(context = {context}\)$"):
            plan(LONG, cluster(room))
    with pytest.raises(InsufficientMemory, match=r"choose a smaller quantisation$"):
        plan(LONG, cluster(bytes_of(LONG, 512) - 1))
    with pytest.raises(InsufficientMemory, match=r"no live node is left.*exclude fewer$"):
        plan(LONG, cluster())


def test_a_requested_context_is_refused_with_the_one_that_fits() -> None:
    room = cluster(bytes_of(LONG, 49_152))
    with pytest.raises(InsufficientMemory, match="up to 49,152 tokens"):
        plan(LONG, room, PlanOptions(context=60_000))
    assert plan(LONG, room, PlanOptions(context=49_152)).context_length == 49_152
    short = bytes_of(LONG, 8192)
    with pytest.raises(InsufficientMemory, match="up to 8,192 tokens"):
        plan(LONG, cluster(short), PlanOptions(shorten=False))


def test_a_split_by_hand_is_shortened_by_the_node_with_the_least_room() -> None:
    layers = ((NodeId("a"), 6), (NodeId("b"), 6))
    room = stage_bytes(LONG, 6, 12, False, 8192, False)
    result = plan(LONG, cluster(10**9, room), PlanOptions(layers=layers))
    assert result.context_length == 8192
    assert "with 8,192 of the model's" in result.reason
    with pytest.raises(InsufficientMemory, match=r"b layers 6-11 of m.* up to 8,192 tokens"):
        plan(LONG, cluster(10**9, room), PlanOptions(layers=layers, context=9000))


def test_a_context_is_shortened_enough_for_the_draft_head() -> None:
    model = card(native_mtp=MTP, context_length=MOST)
    result = plan(model, cluster(bytes_of(model, 8192, mtp=True)))
    assert (result.context_length, result.mtp_off_reason) == (8192, "")
    bare = plan(model, cluster(bytes_of(model, LEAST)))
    assert bare.context_length == LEAST
    assert "free memory there, ask for a context of up to 2,048" in bare.mtp_off_reason


def test_the_draft_head_is_counted_and_never_given_up_for_a_longer_context() -> None:
    model = card(native_mtp=MTP, context_length=MOST)
    result = plan(model, cluster(leaving(65_536, model, mtp=True)))
    assert (result.context_length, result.mtp_off_reason) == (65_536, "")
    room = leaving(65_536, model, mtp=True) - 2
    assert plan(model, cluster(room)).context_length == 49_152


def test_of_several_stages_the_one_with_the_least_left_decides() -> None:
    layers = ((NodeId("a"), 6), (NodeId("b"), 6))
    room = stage_bytes(LONG, 0, 6, True, DEFAULT_CONTEXT, False)
    more = stage_bytes(LONG, 0, 6, True, DEFAULT_CONTEXT + STEP, False)
    results = [
        plan(LONG, cluster(room + 2 * (more - room), rest), PlanOptions(layers=layers))
        for rest in (10**9, room)
    ]
    assert [each.context_length for each in results] == [DEFAULT_CONTEXT + STEP, DEFAULT_CONTEXT]
    assert plan(LONG, cluster(10**9, 10**9), PlanOptions(layers=layers)).context_length == MOST


def assert_shortened_no_more_than_needed(view: ClusterView, options: PlanOptions) -> None:
    try:
        context = plan(LONG, view, options).context_length
    except InsufficientMemory:
        context = 0
    else:
        assert context < DEFAULT_CONTEXT and context % LEAST == 0
        _ = plan(LONG, view, replace(options, context=context))
    with pytest.raises(InsufficientMemory):
        plan(LONG, view, replace(options, context=context + LEAST))


@given(st.lists(st.integers(1_000_000, 60_000_000), min_size=1, max_size=4), st.integers(1, 3))
def test_it_never_changes_the_nodes_and_always_leaves_half(memory: list[int], least: int) -> None:
    view, options = cluster(*memory), PlanOptions(min_nodes=min(least, len(memory)))
    try:
        base = plan(LONG, view, replace(options, context=DEFAULT_CONTEXT))
    except InsufficientMemory:
        assert_shortened_no_more_than_needed(view, options)
        return
    grown = plan(LONG, view, options)
    assert (grown.stages, grown.score, grown.mtp_off_reason) == (
        base.stages,
        base.score,
        base.mtp_off_reason,
    )
    assert grown.context_length == MOST or grown.context_length % STEP == 0
    sizes = {node.id: node.memory_bytes for node in view.nodes}

    def rest(placement: Placement, context: int) -> list[int]:
        return [
            sizes[s.node]
            - stage_bytes(LONG, s.first_layer, s.end_layer, s.first_layer == 0, context, False)
            for s in placement.stages
        ]

    before = rest(base, DEFAULT_CONTEXT)
    if grown.context_length > DEFAULT_CONTEXT:
        after = rest(grown, grown.context_length)
        assert all(2 * b >= a for a, b in zip(before, after, strict=True))
    if grown.context_length < MOST:
        beyond = rest(grown, min(MOST, grown.context_length + STEP))
        assert any(2 * b < a for a, b in zip(before, beyond, strict=True))


def test_a_list_says_whether_a_load_would_shorten_the_context() -> None:
    view = cluster(bytes_of(LONG, 8192))
    short, none = fit(LONG, view), fit(LONG, cluster(1000))
    assert (short.nodes, short.context) == (1, 8192)
    assert short.needed_bytes == bytes_of(LONG, 8192)
    assert (none.nodes, none.needed_bytes) == (0, bytes_of(LONG, LEAST))
    assert f"{LEAST:,} tokens of context" in none.reason
