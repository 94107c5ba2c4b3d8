"""Who would read long prompts of a placement, from which length, and why nobody else."""

from dataclasses import replace

import cards
import pytest
from cards import MTP

from exo_node.node.cli.load import preview_text
from exo_node.node.operations import preview_json, reading_json
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, LayerProfile, LinkFacts, NodeFacts
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import Placement, plan, preview
from exo_node.placement.reader_choice import expected_readers, reading_on

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
ROW_S = 1e-3 / 512
"""Seconds of a layer for a row."""


def card(**changes: object) -> ModelCard:
    facts = {"hidden_size": 64, "vocab_size": 100, "num_key_value_heads": 2, "head_dim": 16}
    facts |= {"context_length": 32_768, "weight_bytes": 120_000_000, "native_mtp": MTP}
    return cards.card(12, **facts | changes)


def cluster(**of_b: object) -> ClusterView:
    """Node a answers; b is its twin, with these facts."""
    profile = LayerProfile(1e-3, 1e-3, ROW_S * 512)
    own = NodeFacts(
        A, "alpha", 10**9, 1e9, "metal", "M3", frozenset({ModelId("m")}), profile,
        prefill_s=ROW_S * 512,
    )  # fmt: skip
    twin = replace(own, id=B, name="beta", memory_bytes=9 * 10**8)
    return ClusterView(
        (own, replace(twin, **of_b)),  # pyright: ignore[reportArgumentType]
        (LinkFacts(A, B, 1e-4, 1.25e9),),
    )


def placed(view: ClusterView, **changes: object) -> Placement:
    return replace(plan(card(), view, PlanOptions(nodes=(A,))), **changes)  # pyright: ignore[reportArgumentType]


def test_a_copy_reads_the_upper_layers_from_the_length_on_that_the_planner_finds() -> None:
    view = cluster()
    found = expected_readers(card(), placed(view), view, {A, B})
    ((node, first, end),) = [(r.node, r.first_layer, r.end_layer) for r in found.readers]
    assert (node, first, end) == (B, 6, 12)
    chunk = placed(view).prefill_chunk
    shortest, others = found.rows, {B: (1, 0)}
    assert 0 < shortest < 16_384
    assert reading_on(card(), placed(view), view, A, others, shortest, 0).readers
    assert not reading_on(card(), placed(view), view, A, others, shortest - chunk, 0).readers
    start = f"from about {shortest:,} tokens on, with beta (layers 6-11): 16384 tokens take "
    assert found.reason.startswith(start)


def test_a_node_without_a_copy_reads_if_it_may_hold_upper_layers() -> None:
    view = cluster(keeps_readers=True, memory_bytes=80_000_000)
    ((layers),) = expected_readers(card(), placed(view), view, set()).readers
    assert layers.node == B and layers.end_layer == 12 and layers.first_layer > 6


NONE = [
    ({}, "beta holds no copy of it, and EXO_READERS is not 1 there", False),
    ({"reads": False}, "beta has EXO_READERS=0", True),
    ({"chip": "M2"}, "beta is a machine of another kind", True),
    ({"chip": "M2", "keeps_readers": True}, "beta is a machine of another kind", False),
    ({"models": frozenset[ModelId](), "keeps_readers": True}, "beta lacks its files", False),
    ({"memory_bytes": 100, "keeps_readers": True}, "beta has no room for a layer of it", False),
    ({"prefill_s": 1.0, "keeps_readers": True}, "beta would not make it quicker", False),
]


@pytest.mark.parametrize(("facts", "why", "has_copy"), NONE, ids=lambda each: str(each)[:40])
def test_what_keeps_a_node_from_reading_is_said(
    facts: dict[str, object], why: str, has_copy: bool
) -> None:
    view = cluster(**facts)
    found = expected_readers(card(), placed(view), view, {A, B} if has_copy else set())
    assert (found.readers, found.rows, found.reason) == ((), 0, why)


def test_another_kind_of_machine_reads_where_both_allow_it() -> None:
    view = cluster(chip="H200", backend="cuda", reads_any=True, keeps_readers=True)
    own = replace(view.nodes[0], reads_any=True)
    for nodes, count in ((view.nodes, 0), ((own, view.nodes[1]), 1)):
        mixed = replace(view, nodes=nodes)
        for copies in ({A, B}, set[NodeId]()):
            found = expected_readers(card(), placed(mixed), mixed, copies)
            assert len(found.readers) == count, found.reason


def test_without_a_link_nobody_reads() -> None:
    view = replace(cluster(keeps_readers=True), links=())
    for copies in (set[NodeId](), {A, B}):
        found = expected_readers(card(), placed(view), view, copies)
        assert (found.readers, found.reason) == ((), "beta has no measured link")


def test_a_context_that_is_too_short_has_the_longest_prompts_reason() -> None:
    view = cluster()
    found = expected_readers(card(), placed(view, context_length=1024), view, {A, B})
    assert (found.rows, found.reason) == (0, "alone: 1024 tokens are 2 forwards, too few to share")


def test_who_reads_alone_says_why() -> None:
    view = replace(cluster(), nodes=cluster().nodes[:1])
    assert expected_readers(card(), placed(view), view, {A}).reason == "there is no other node"
    off = replace(view, nodes=(replace(view.nodes[0], reads=False),))
    assert expected_readers(card(), placed(view), off, {A}).reason == "EXO_READERS=0 on alpha"
    both = plan(card(), cluster(), PlanOptions(nodes=(A, B)))
    split = expected_readers(card(), both, cluster(), {A, B})
    assert split.reason == "none but those: its stages read them in turn"


def test_a_preview_shows_it_in_json_and_in_the_terminal() -> None:
    view = cluster()
    choice = preview(card(), view, PlanOptions(nodes=(A,)))
    body = preview_json(card(), choice, view, "") | reading_json(
        expected_readers(card(), choice.best, view, {A, B}), view
    )
    assert body["readers"] == [{"node": "b", "name": "beta", "layers": [6, 12]}]
    assert body["readers_from_tokens"] % 512 == 0
    assert f"\nlong prompts: {body['read_reason']}" in preview_text(body)
