from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from exo_node.placement.card import ModelCard, parse_card
from exo_node.placement.cluster import ClusterView, LinkFacts, NodeFacts
from exo_node.placement.cost import seconds_per_token, stage_bytes
from exo_node.placement.errors import InsufficientMemory, InvalidRequest
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.plan import ASSUMED_MTP_SPEEDUP, Placement, plan
from exo_node.placement.split import proportional_layers, stage_ends

KB = 1024
MTP = {"default_k": 1, "max_k": 3}


def card(layers: int = 12, weight_bytes: int = 1000 * KB, **changes: object) -> ModelCard:
    """Ends and caches so small that `weight_bytes` are the layers."""
    facts = {
        "id": "m",
        "model_type": "llama",
        "num_layers": layers,
        "hidden_size": 1,
        "vocab_size": 1,
        "num_attention_layers": layers,
        "num_key_value_heads": 1,
        "head_dim": 1,
        "context_length": 1,
        "weight_bytes": weight_bytes,
    }
    return parse_card(facts | changes, "test.toml")


def cluster(*memory: int, bandwidth: tuple[float, ...] = ()) -> ClusterView:
    """Nodes a, b, c …; of falling bandwidth unless told, so that stages keep this order."""
    speeds = bandwidth or tuple(1e9 - i for i in range(len(memory)))
    ids = [NodeId(chr(ord("a") + i)) for i in range(len(memory))]
    nodes = (
        NodeFacts(id, f"node-{id}", size, speed)
        for id, size, speed in zip(ids, memory, speeds, strict=True)
    )
    return ClusterView(tuple(nodes))


def layers_of(placement: Placement) -> dict[str, int]:
    return {stage.node: stage.end_layer - stage.first_layer for stage in placement.stages}


# exo's shard cases. exo gives each node storage * layers / num_layers and nothing else, so its
# clusters of exactly the model's size fit; ours needs the 20 % headroom: memory is half as much
# again here, in the same proportions.
@pytest.mark.parametrize(
    ("memory", "total", "layers"),
    [
        ((500, 500, 1000), 12, [3, 3, 6]),
        ((500, 500, 500), 12, [4, 4, 4]),
        ((312, 518, 1024), 12, [2, 3, 7]),
        ((312, 468, 1092), 12, [2, 3, 7]),
    ],
)
def test_three_nodes_split_in_proportion_to_memory(
    memory: tuple[int, ...], total: int, layers: list[int]
) -> None:
    view = cluster(*(size * KB * 3 // 2 for size in memory))
    placement = plan(card(total), view, min_nodes=3)
    assert list(layers_of(placement).values()) == layers
    assert placement.stages[0].first_layer == 0
    assert placement.stages[-1].end_layer == total


def test_a_node_too_small_for_its_share_gives_layers_to_one_with_room() -> None:
    # In proportion b would get 2 of 10 layers, which need 240 KB with headroom.
    view = cluster(850 * KB * 2, 239 * KB)
    assert proportional_layers(10, [850 * 2, 239]) == [9, 1]
    tight = cluster(900 * KB, 359 * KB)
    assert proportional_layers(10, [900, 359]) == [7, 3]  # three need 360 KB
    assert list(layers_of(plan(card(10, 990 * KB), tight, min_nodes=2)).values()) == [7, 3]
    with pytest.raises(InsufficientMemory):
        plan(card(10, 1000 * KB), tight, min_nodes=2)
    roomy = cluster(990 * KB, 359 * KB)
    assert list(layers_of(plan(card(10, 1000 * KB), roomy, min_nodes=2)).values()) == [8, 2]
    assert list(layers_of(plan(card(10, 1000 * KB), view, min_nodes=2)).values()) == [9, 1]


@pytest.mark.parametrize(
    ("memory", "weight", "total"),
    [
        ((900, 50, 10), 1000, 20),  # exo refuses too: c has 10 KB and a layer needs 50
        ((900, 50, 50), 1000, 20),  # exo takes these two: the sum is the model, with no room for
        ((500, 500, 1000), 2000, 12),  # anything else, and its runner then ends out of memory
        ((1000,), 1001, 12),  # exo refuses too
        ((1000,), 1000, 12),  # exo takes it: no headroom
    ],
)
def test_a_model_that_nothing_holds_is_refused(
    memory: tuple[int, ...], weight: int, total: int
) -> None:
    with pytest.raises(InsufficientMemory):
        plan(card(total, weight * KB), cluster(*(size * KB for size in memory)))


def test_the_refusal_says_what_is_needed_what_there_is_and_what_to_do() -> None:
    model, view = card(weight_bytes=10**9), cluster(5 * 10**8, 4 * 10**8)
    with pytest.raises(InsufficientMemory) as caught:
        plan(model, view, max_nodes=1, exclude=(NodeId("z"),))
    message = caught.value.message
    assert "m needs 1.21 GB for weights, 1 tokens of KV and headroom" in message
    assert "no set of one node can hold it: node-a has 0.50 GB, node-b has 0.40 GB" in message
    for remedy in ("free memory", "raise max_nodes = 1", "exclude fewer", "smaller quantisation"):
        assert remedy in message


# exo's cycle filters ask for links in both directions and prefer leaves of a daisy chain. Here
# every node dials every other (a link that was not measured is assumed slow, not absent), so of
# those cases only the sizes remain.
@pytest.mark.parametrize(
    ("memory", "needed", "nodes"),
    [
        ((1000, 1000), 1, 1),
        ((1000, 1000), 1600, 2),
        ((500, 500, 1000), 1500, 3),
        ((500, 600, 600, 500), 900, 2),
    ],
)
def test_the_smallest_set_that_holds_the_model_is_taken(
    memory: tuple[int, ...], needed: int, nodes: int
) -> None:
    placement = plan(card(12, needed * KB), cluster(*(size * KB for size in memory)))
    assert len(placement.stages) == nodes


def test_the_fastest_single_node_wins_and_the_next_is_named() -> None:
    view = cluster(10**9, 10**9, 10**9, bandwidth=(1e9, 3e9, 2e9))
    placement = plan(card(), view)
    assert layers_of(placement) == {"b": 12}
    assert placement.reason.startswith(
        "node-b alone, 0.341 ms a token by memory bandwidth: the fastest of 3"
    )
    assert placement.runner_up == "node-c alone, 0.512 ms a token by memory bandwidth"
    assert placement.score == seconds_per_token(card(), placement.stages, view)


# exo weighs the downloaded share before memory, and nothing before it; here speed comes first, and
# a model is on a disk or not.
def test_of_equally_fast_nodes_the_one_with_the_model_on_disk_wins() -> None:
    view = cluster(2000 * KB, 2000 * KB, bandwidth=(1e9, 1e9))
    a, b = view.nodes
    assert layers_of(plan(card(), view)) == {"a": 12}
    has = replace(view, nodes=(a, replace(b, models=frozenset({ModelId("m")}))))
    assert layers_of(plan(card(), has)) == {"b": 12}
    slow = replace(b, models=frozenset({ModelId("m")}), memory_bandwidth=0.9e9)
    assert layers_of(plan(card(), replace(view, nodes=(a, slow)))) == {"a": 12}
    roomier = replace(b, memory_bytes=3000 * KB)
    assert layers_of(plan(card(), replace(view, nodes=(a, roomier)))) == {"b": 12}


def test_the_only_node_is_called_that() -> None:
    placement = plan(card(), cluster(10**9))
    assert "the only node" in placement.reason
    assert placement.runner_up is None
    two = plan(card(), cluster(10**9, 10))
    assert "the only one of 2 nodes with enough memory" in two.reason


def test_a_split_says_why_and_why_it_cannot_draft() -> None:
    model, view = card(native_mtp=MTP), cluster(800 * KB, 800 * KB)
    forced = plan(model, cluster(10**9, 10**9), min_nodes=2)
    assert "min_nodes = 2 was asked for; no native MTP: it runs only where" in forced.reason
    assert "node-a layers 0-5, node-b layers 6-11" in forced.reason
    needed = plan(model, view)
    assert "no node alone has enough memory (0.01 GB" in needed.reason
    assert "has 2 stages" in needed.mtp_off_reason
    assert "native MTP" not in plan(card(), view).reason
    assert plan(card(), view).mtp_off_reason == ""
    assert plan(model, view, native_mtp=False).mtp_off_reason == ""


def test_a_node_without_room_for_the_head_still_holds_the_model() -> None:
    model = card(native_mtp=MTP)
    bare = stage_bytes(model, 0, 12, True, 1, False)
    placement = plan(model, cluster(bare))
    assert len(placement.stages) == 1
    assert "with the MTP head m needs 0.01 GB, and node-a has 0.00 GB" in placement.mtp_off_reason
    assert "free memory there" in placement.mtp_off_reason
    assert placement.mtp_off_reason in placement.reason
    assert plan(model, cluster(bare), native_mtp=False).mtp_off_reason == ""
    full = stage_bytes(model, 0, 12, True, 1, True)
    assert plan(model, cluster(full)).mtp_off_reason == ""


def test_a_node_that_can_draft_beats_one_that_is_barely_faster() -> None:
    model = card(native_mtp=MTP)
    bare = stage_bytes(model, 0, 12, True, 1, False)
    assert layers_of(plan(model, cluster(bare, 10**9, bandwidth=(1.1e9, 1e9)))) == {"b": 12}
    assert layers_of(plan(model, cluster(bare, 10**9, bandwidth=(1.3e9, 1e9)))) == {"a": 12}


def test_the_generator_is_the_fastest_that_can_hold_the_ends() -> None:
    big_ends = card(4, 400 * KB, vocab_size=50 * KB)  # 100 KB twice
    quick_but_small = cluster(199 * KB, 900 * KB, bandwidth=(9e9, 1e9))
    assert plan(big_ends, quick_but_small, min_nodes=2).stages[0].node == "b"
    quick = cluster(400 * KB, 900 * KB, bandwidth=(9e9, 1e9))
    assert plan(big_ends, quick, min_nodes=2).stages[0].node == "a"


def test_of_two_sets_the_one_with_the_quicker_link_wins() -> None:
    view = cluster(800 * KB, 800 * KB, 800 * KB, bandwidth=(1e9, 1e9, 1e9))
    a, b, c = (node.id for node in view.nodes)
    links = (LinkFacts(a, b, 5e-3, 1e8), LinkFacts(c, a, 1e-4, 1e9), LinkFacts(b, c, 5e-3, 1e8))
    placement = plan(card(), replace(view, links=links))
    assert set(layers_of(placement)) == {"a", "c"}
    assert placement.runner_up is not None
    assert "node-b" in placement.runner_up


def test_of_equally_fast_sets_the_one_with_less_to_download_wins() -> None:
    view = cluster(800 * KB, 800 * KB, 800 * KB, bandwidth=(1e9, 1e9, 1e9))
    assert set(layers_of(plan(card(), view))) == {"a", "b"}
    a, b, c = (replace(node, models=frozenset({ModelId("m")})) for node in view.nodes)
    assert set(layers_of(plan(card(), replace(view, nodes=(view.nodes[0], b, c))))) == {"b", "c"}
    assert set(layers_of(plan(card(), replace(view, nodes=(a, view.nodes[1], c))))) == {"a", "c"}


def test_in_a_large_cluster_the_nodes_with_the_most_memory_are_tried() -> None:
    view = cluster(*[200 * KB] * 10, 700 * KB, 700 * KB)
    assert set(layers_of(plan(card(), view))) == {"k", "l"}


def test_context_takes_memory_and_is_reported() -> None:
    long = card(context_length=100_000)
    roomy = cluster(10**9)
    assert plan(long, roomy).context_length == 32768
    assert plan(card(context_length=500), roomy).context_length == 500
    assert plan(long, roomy, context=100_000).context_length == 100_000
    just = cluster(stage_bytes(long, 0, 12, True, 1000, False))
    assert plan(long, just, context=1000).context_length == 1000
    with pytest.raises(InsufficientMemory, match="1001 tokens of KV"):
        plan(long, just, context=1001)


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"min_nodes": 3}, "min_nodes", "min_nodes is 3 of 2 live nodes; ask for 1 to 2"),
        ({"min_nodes": 0}, "min_nodes", "ask for 1 to 2"),
        ({"min_nodes": 2, "exclude": ("a",)}, "min_nodes", "2 of 1 live nodes"),
        ({"min_nodes": 2, "max_nodes": 1}, "max_nodes", "below min_nodes = 2"),
        ({"max_nodes": 0}, "max_nodes", "below min_nodes = 1"),
        ({"context": 0}, "context", "m takes 1 to 1"),
        ({"context": 2}, "context", "m takes 1 to 1"),
    ],
)
def test_a_bound_that_nothing_meets_is_the_requests_fault(
    asked: dict[str, object], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        plan(card(), cluster(10**9, 10**9), **asked)  # pyright: ignore[reportArgumentType]
    assert caught.value.param == param


def test_a_model_cannot_have_more_stages_than_layers() -> None:
    with pytest.raises(InvalidRequest, match="m has 2 layers to share") as caught:
        plan(card(2), cluster(10**9, 10**9, 10**9), min_nodes=3)
    assert caught.value.param == "min_nodes"
    assert len(plan(card(2), cluster(10**9, 10**9, 10**9), min_nodes=2).stages) == 2


def test_an_excluded_node_is_never_used_and_excluding_all_is_refused() -> None:
    view = cluster(10**9, 10**9)
    assert layers_of(plan(card(), view, exclude=(NodeId("a"),))) == {"b": 12}
    with pytest.raises(InsufficientMemory, match="no live node is left"):
        plan(card(), view, exclude=(NodeId("a"), NodeId("b")))
    with pytest.raises(InsufficientMemory, match="no live node is left"):
        plan(card(), ClusterView(()))


def fits(model: ModelCard, view: ClusterView, placement: Placement) -> bool:
    return all(
        stage_bytes(
            model,
            stage.first_layer,
            stage.end_layer,
            index == 0,
            placement.context_length,
            index == 0 and len(placement.stages) == 1 and not placement.mtp_off_reason,
        )
        <= view.node(stage.node).memory_bytes
        for index, stage in enumerate(placement.stages)
    )


@st.composite
def any_card(draw: st.DrawFn, least: int = 1, most: int = 24) -> ModelCard:
    layers = draw(st.integers(least, most))
    return card(
        layers,
        draw(st.integers(1, 2000 * KB)),
        num_attention_layers=draw(st.integers(0, layers)),
        context_length=draw(st.integers(1, 3000)),
        vocab_size=draw(st.integers(1, 50 * KB)),
        quantization=draw(st.sampled_from([None, 4])),
        native_mtp=draw(st.sampled_from([None, MTP])),
    )


clusters = st.lists(
    st.tuples(st.integers(0, 2000 * KB), st.sampled_from([0.0, 1e8, 4e8, 8e8])),
    min_size=1,
    max_size=4,
).map(lambda nodes: cluster(*(n[0] for n in nodes), bandwidth=tuple(n[1] for n in nodes)))


@settings(max_examples=300, deadline=None)
@given(any_card(), clusters, st.integers(1, 3))
def test_every_placement_is_whole_contiguous_and_within_memory(
    model: ModelCard, view: ClusterView, min_nodes: int
) -> None:
    assume(min_nodes <= min(len(view.nodes), model.num_layers))
    try:
        placement = plan(model, view, min_nodes=min_nodes)
    except InsufficientMemory:
        return
    stages = placement.stages
    assert (stages[0].first_layer, stages[-1].end_layer) == (0, model.num_layers)
    assert all(a.end_layer == b.first_layer for a, b in pairwise(stages))
    assert all(stage.first_layer < stage.end_layer for stage in stages)
    assert len({stage.node for stage in stages}) == len(stages) >= min_nodes
    assert fits(model, view, placement)
    shuffled = ClusterView(view.nodes[::-1], view.links)
    assert plan(model, shuffled, min_nodes=min_nodes) == placement


@settings(max_examples=200, deadline=None)
@given(any_card(), clusters)
def test_the_single_node_is_the_one_that_brute_force_finds(
    model: ModelCard, view: ClusterView
) -> None:
    context = min(model.context_length, 32768)

    def seconds(node: NodeFacts) -> float | None:
        needs = [
            stage_bytes(model, 0, model.num_layers, True, context, mtp) for mtp in (False, True)
        ]
        if node.memory_bytes < needs[0]:
            return None
        read = model.num_layers * model.active_layer_bytes + model.lm_head_bytes
        drafts = model.native_mtp is not None and node.memory_bytes >= needs[1]
        plain = read / (node.memory_bandwidth or 50e9)
        return plain / ASSUMED_MTP_SPEEDUP if drafts else plain

    able = [(time, node) for node in view.nodes if (time := seconds(node)) is not None]
    assume(able)
    best = min(time for time, _ in able)
    chosen = plan(model, view).stages
    assert len(chosen) == 1
    assert chosen[0].node in {node.id for time, node in able if time == best}


def cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(*cut, layers) for cut in combinations(range(1, layers), stages - 1)]


@settings(max_examples=200, deadline=None)
@given(any_card(least=3, most=10), st.lists(st.integers(0, 120), min_size=2, max_size=3))
def test_a_split_is_found_exactly_when_one_exists(model: ModelCard, percent: list[int]) -> None:
    layers, context = model.num_layers, model.context_length
    one = stage_bytes(model, layers - 1, layers, False, context, False)
    whole = stage_bytes(model, 0, layers, True, context, False)
    memory = [one + whole * share // 100 for share in percent]

    def holds(ends: tuple[int, ...] | list[int]) -> bool:
        ranges = pairwise((0, *ends))
        return all(
            stage_bytes(model, first, end, i == 0, context, False) <= memory[i]
            for i, (first, end) in enumerate(ranges)
        )

    found = stage_ends(model, memory, context)
    assert (found is not None) is any(holds(cut) for cut in cuts(layers, len(memory)))
    if found is not None:
        assert holds(found)


@settings(max_examples=100, deadline=None)
@given(any_card(most=6), clusters, st.booleans())
def test_a_refusal_means_that_no_order_of_any_nodes_can_hold_it(
    model: ModelCard, view: ClusterView, cached: bool
) -> None:
    # Of uniform layers only the generator's place counts; where some hold a cache and some do not,
    # an order that `plan` does not try may fit by a hair.
    holding = model.num_layers if cached else 0
    model = model.model_copy(update={"num_attention_layers": holding})
    layers, context = model.num_layers, min(model.context_length, 32768)
    try:
        plan(model, view)
    except InsufficientMemory:
        one = stage_bytes(model, layers - 1, layers, False, context, False)
        able = [node.memory_bytes for node in view.nodes if node.memory_bytes >= one]
        for size in range(1, min(len(able), layers) + 1):
            for memory in permutations(able, size):
                assert stage_ends(model, memory, context) is None
