"""Previews and the options of a plan: bounds, pins, splits by hand; over HTTP and as text."""

from dataclasses import replace

import cards
import pytest
from cards import MTP

from exo_node.node.api.operations.plan_request import PlacementBody, PlanBody, parse_query
from exo_node.node.cli.load import preview_path, preview_text
from exo_node.node.operations import preview_json
from exo_node.node.store.sources import estimate_transfers
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, LayerProfile, LinkFacts, NodeFacts, evened
from exo_node.placement.errors import InsufficientMemory, InvalidRequest
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import plan, planned_bytes, preview
from exo_node.placement.split_refusal import SplitRefusal, refusal_in

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def card(**changes: object) -> ModelCard:
    facts = {"hidden_size": 64, "vocab_size": 100, "num_key_value_heads": 2, "head_dim": 16}
    facts |= {"context_length": 1000, "weight_bytes": 120_000_000}
    return cards.card(12, **facts | changes)


def cluster(*megabytes: int) -> ClusterView:
    ids = (A, B, C)
    sizes = zip(ids, megabytes, strict=False)
    return ClusterView(tuple(NodeFacts(i, f"node-{i}", mb * 10**6, 1e9) for i, mb in sizes))


def test_a_preview_is_the_plan_with_the_runner_up_and_the_bound() -> None:
    planned = preview(card(native_mtp=MTP), cluster(400, 300, 80))
    assert planned.best == plan(card(native_mtp=MTP), cluster(400, 300, 80))
    assert [stage.node for stage in planned.best.stages] == [A]
    assert planned.runner_up is not None
    assert [stage.node for stage in planned.runner_up.stages] == [B]
    assert planned.best.runner_up == planned.runner_up.reason
    assert planned.bound_s == planned.best.score
    assert planned.candidates_considered >= 2
    assert planned.drafting == "native MTP is expected to make it 1.2 times as fast (assumed)"


@pytest.mark.parametrize(
    ("changes", "memory", "says"),
    [
        ({}, (400,), "does not declare native MTP"),
        ({"native_mtp": MTP}, (100, 100), "this placement has 2 stages"),
        ({"native_mtp": MTP}, (140,), "with the MTP head m needs"),
    ],
)
def test_a_preview_says_why_nothing_will_draft(
    changes: dict[str, object], memory: tuple[int, ...], says: str
) -> None:
    planned = preview(card(**changes), cluster(*memory))
    assert says in planned.drafting


def test_pinned_nodes_are_all_used_and_no_others() -> None:
    view = cluster(400, 300, 300)
    both = plan(card(), view, PlanOptions(nodes=(C, B)))
    assert {stage.node for stage in both.stages} == {B, C}
    assert "because these nodes were asked for" in both.reason
    one = plan(card(), view, PlanOptions(nodes=(C,)))
    assert [stage.node for stage in one.stages] == [C]
    assert "the node that was named" in one.reason
    with pytest.raises(InsufficientMemory, match="the nodes that were named"):
        plan(card(), cluster(400, 60, 60), PlanOptions(nodes=(B, C)))


def test_a_split_by_hand_is_kept_and_compared() -> None:
    view = cluster(400, 300, 300)
    planned = preview(card(), view, PlanOptions(layers=((B, 5), (A, 7))))
    assert [(s.node, s.first_layer, s.end_layer) for s in planned.best.stages] == [
        (B, 0, 5),
        (A, 5, 12),
    ]
    assert "because this split was asked for" in planned.best.reason
    assert planned.runner_up is not None
    assert [stage.node for stage in planned.runner_up.stages] == [A]
    assert planned.bound_s == planned.runner_up.score < planned.best.score
    alone = preview(card(), view, PlanOptions(layers=((A, 12),)))  # what would be planned too
    assert alone.runner_up is not None
    assert [stage.node for stage in alone.runner_up.stages] == [B]


IMPOSSIBLE = [
    ({"nodes": (A, NodeId("z"))}, "nodes", "nodes: z is no live node; there are node-a, node-b"),
    ({"nodes": (A, A)}, "nodes", "node-a stands there twice; name each node once"),
    ({"nodes": (A,), "exclude": frozenset({A})}, "nodes", "node-a is in exclude too"),
    ({"nodes": (A,), "min_nodes": 2}, "min_nodes", "min_nodes is 2, and nodes names 1; leave"),
    ({"nodes": (A, B), "max_nodes": 1}, "max_nodes", "max_nodes is 1, and nodes names 2; leave"),
    ({"layers": ((NodeId("z"), 12),)}, "layers", "layers: z is no live node"),
    ({"layers": ((A, 6), (A, 6))}, "layers", "twice"),
    ({"layers": ((A, 12), (B, 0))}, "layers", "gives node-b 0 layers; give it 1 or more"),
    ({"layers": ((A, 6), (B, 5))}, "layers", "adds up to 11, and m has 12; give 1 more"),
    ({"layers": ((A, 9), (B, 5))}, "layers", "adds up to 14, and m has 12; give fewer"),
    ({"layers": ((A, 6), (B, 6)), "nodes": (A, C)}, "layers", "other nodes than nodes"),
]


@pytest.mark.parametrize(("options", "param", "says"), IMPOSSIBLE)
def test_what_cannot_be_met_names_the_field_and_the_remedy(
    options: dict[str, object], param: str, says: str
) -> None:
    plan_options = replace(PlanOptions(), **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match=says) as caught:
        plan(card(), cluster(400, 300, 300), plan_options)
    assert caught.value.param == param


def test_a_split_by_hand_that_does_not_fit_gives_the_figures() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        plan(card(), cluster(300, 60), PlanOptions(layers=((A, 6), (B, 6))))
    assert "layers gives node-b layers 6-11 of m, which need 0.08 GB with 1,000 tokens" in str(
        caught.value
    )
    assert "it has 0.06 GB; give it fewer layers" in str(caught.value)
    assert caught.value.param == "layers"


def test_a_model_that_must_not_be_split_runs_on_one_node_or_not_at_all() -> None:
    refusal = "its layers share a cache"
    view = cluster(400, 300, 60)
    chosen = plan(card(), view, pipeline_refusal=SplitRefusal(refusal))
    assert len(chosen.stages) == 1
    assert chosen.reason.endswith(f"not split: {refusal}")
    with pytest.raises(InsufficientMemory, match=refusal):
        plan(card(), cluster(100, 100), pipeline_refusal=SplitRefusal(refusal))
    refused = [
        ("min_nodes", PlanOptions(min_nodes=2)),
        ("nodes", PlanOptions(nodes=(A, B))),
        ("layers", PlanOptions(layers=((A, 6), (B, 6)))),
    ]
    for field, options in refused:
        with pytest.raises(InvalidRequest, match=f"one node only: {refusal}") as caught:
            plan(card(), view, options, pipeline_refusal=SplitRefusal(refusal))
        assert caught.value.param == field


def meeting_at(*borders: int) -> SplitRefusal:
    return SplitRefusal("a window is shared", frozenset(borders))


@pytest.mark.parametrize("border", [1, 3, 5, 7, 11])
def test_stages_meet_only_where_the_model_may_be_split(border: int) -> None:
    view = cluster(400, 300)
    options = PlanOptions(min_nodes=2)
    chosen = plan(card(), view, options, pipeline_refusal=meeting_at(border))
    assert [stage.end_layer for stage in chosen.stages] == [border, 12]
    assert f"not split elsewhere: a window is shared (stages may begin at layer {border})" in (
        chosen.reason
    )


def test_three_stages_keep_to_the_borders_too() -> None:
    options = PlanOptions(min_nodes=3)
    view = cluster(400, 300, 300)
    chosen = plan(card(), view, options, pipeline_refusal=meeting_at(2, 7))
    assert [stage.end_layer for stage in chosen.stages] == [2, 7, 12]
    with pytest.raises(InsufficientMemory, match="not split elsewhere: a window is shared"):
        plan(card(), view, options, pipeline_refusal=meeting_at(7))


def test_a_split_by_hand_at_another_border_is_refused_and_told_which_do() -> None:
    view, options = cluster(400, 300), PlanOptions(layers=((A, 6), (B, 6)))
    with pytest.raises(InvalidRequest, match=r"layers .* may begin at layer 4, 8") as caught:
        plan(card(), view, options, pipeline_refusal=meeting_at(4, 8))
    assert caught.value.param == "layers"
    assert plan(card(), view, options, pipeline_refusal=meeting_at(6)).stages[0].end_layer == 6


@pytest.mark.parametrize("borders", [(), (7,), (1, 2, 1023)])
def test_a_refusal_survives_the_way_from_a_runner(borders: tuple[int, ...]) -> None:
    refusal = meeting_at(*borders)
    assert refusal_in(refusal.param, refusal.reason) == refusal


@pytest.mark.parametrize("param", [None, "", "layers", "pipeline:", "pipeline:x", "pipeline:1,"])
def test_another_errors_param_says_nothing_of_splitting(param: str | None) -> None:
    assert not refusal_in(param, "no memory")


def test_twins_that_measured_a_little_apart_share_evenly() -> None:
    def split(a: float, b: float) -> list[int]:
        profiles = (LayerProfile(a), LayerProfile(b))
        pairs = zip(cluster(140, 140).nodes, profiles, strict=True)
        nodes = evened([replace(node, profile=profile) for node, profile in pairs])
        stages = plan(card(), ClusterView(nodes), PlanOptions(min_nodes=2)).stages
        return [stage.end_layer - stage.first_layer for stage in stages]

    assert split(1e-3, 1.04e-3) == [6, 6]
    assert split(1e-3, 1.2e-3) == [11, 1]


def test_a_query_says_what_a_body_says() -> None:
    body = parse_query(
        [
            ("model", "owner/m"),
            ("min_nodes", "2"),
            ("max_nodes", "3"),
            ("context", "500"),
            ("nodes", "a,node-b"),
            ("layers", "node-b:5,a:7"),
            ("exclude", "c"),
            ("drafter", "a/drafter"),
        ]
    )
    assert body == PlanBody.model_validate(
        {
            "model": "owner/m",
            "min_nodes": 2,
            "max_nodes": 3,
            "context": 500,
            "nodes": ["a", "node-b"],
            "layers": [{"node": "node-b", "layers": 5}, {"node": "a", "layers": 7}],
            "exclude": ["c"],
            "drafter": "a/drafter",
        }
    )
    assert body.options(cluster(1, 1, 1).nodes, None) == PlanOptions(
        2, 3, 500, frozenset({C}), (A, B), ((B, 5), (A, 7))
    )
    assert PlacementBody(model="m").options((), None) == PlanOptions()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ([], "model"),
        ([("model", "m"), ("min_node", "2")], "min_node"),
        ([("model", "m"), ("spares", "1")], "spares"),
        ([("model", "m"), ("model", "n")], "model"),
        ([("model", "m"), ("min_nodes", "two")], "min_nodes"),
        ([("model", "m"), ("min_nodes", "-1")], "min_nodes"),
        ([("model", "m"), ("min_nodes", "0")], "min_nodes"),
        ([("model", "m"), ("context", "9" * 5000)], "context"),
        ([("model", "m"), ("nodes", "")], "nodes[0]"),
        ([("model", "m"), ("layers", "a")], "layers"),
        ([("model", "m"), ("layers", "a:x")], "layers"),
        ([("model", "m"), ("layers", ":3")], "layers"),
        ([("model", "m"), ("layers", "a:0")], "layers[0].layers"),
    ],
)
def test_a_query_with_a_fault_names_its_field(query: list[tuple[str, str]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_query(query)
    assert caught.value.param == param


def test_a_node_goes_by_name_or_id_and_an_ambiguous_name_is_refused() -> None:
    twins = ClusterView((NodeFacts(A, "mac", 1, 1), NodeFacts(B, "mac", 1, 1)))
    by_id = PlanBody(model="m", nodes=["b"])
    assert by_id.options(twins.nodes, None).nodes == (B,)
    for body, says in [
        (PlanBody(model="m", exclude=["mac"]), r"'mac' means several of .*: mac \(a\), mac \(b\)"),
        (PlanBody(model="m", exclude=["pc"]), "'pc' means none of the live nodes"),
    ]:
        with pytest.raises(InvalidRequest, match=says) as caught:
            body.options(twins.nodes, None)
        assert caught.value.param == "exclude"


def test_a_preview_says_what_each_node_copies_and_how_long_that_takes() -> None:
    models = frozenset({ModelId("m")})
    view = cluster(100, 100, 100)
    nodes = [replace(n, models=models if n.id != A else frozenset[ModelId]()) for n in view.nodes]
    links = (LinkFacts(A, B, 0.001, 1e6), LinkFacts(A, C, 0.001, 1e7))
    view = ClusterView(tuple(nodes), links)
    planned = preview(card(), view, PlanOptions(nodes=(A, B)))
    [about] = estimate_transfers(card(), planned.best.stages, view)
    assert (about.node, about.nbytes) == (A, card().weight_bytes)
    assert (about.source, about.seconds) == ("node-c", card().weight_bytes / 1e7)
    text = preview_text(
        preview_json(card(), planned, view, "", ([about], ())) | {"refusal": "pull it"}
    )
    assert "  node-a copies up to 0.1 GB from node-c, about 12 s\n" in text
    assert text.endswith("not loaded as it is: pull it")
    nobody = cluster(400)
    [all_of_it] = estimate_transfers(card(), preview(card(), nobody).best.stages, nobody)
    assert (all_of_it.nbytes, all_of_it.source, all_of_it.seconds) == (120_000_000, None, None)


@pytest.mark.parametrize("head", [None, MTP])
def test_the_memory_that_a_preview_names_is_just_what_the_planner_needs(head: object) -> None:
    large = card(vocab_size=100_000, **({} if head is None else {"native_mtp": head}))
    needed = planned_bytes(large, plan(large, cluster(1000)), 0)

    def holding(memory: int) -> ClusterView:
        return ClusterView((NodeFacts(A, "node-a", memory, 1e9),))

    least = plan(large, holding(needed))
    assert planned_bytes(large, least, 0) == needed
    assert least.mtp_off_reason == ""
    if head is not None:  # a byte less costs the head first
        assert plan(large, holding(needed - 1)).mtp_off_reason
        return
    with pytest.raises(InsufficientMemory):
        _ = plan(large, holding(needed - 1))


def test_a_preview_of_quantised_caches_shows_their_bits_and_why() -> None:
    view, options = cluster(400), PlanOptions(kv_bits=8)
    body = preview_json(card(head_dim=64), preview(card(head_dim=64), view, options), view, "")
    assert (body["best"]["kv_bits"], body["best"]["kv_bits_reason"]) == (
        8,
        "kv_bits = 8 was requested",
    )
    text = preview_text(body)
    assert "tokens of context, in bfloat16, caches of 8 bits\n" in text
    assert "attention caches have 8 bits a number, 53 % of their bytes in bfloat16" in text


def test_a_preview_in_the_terminal_says_where_what_else_and_why() -> None:
    view = cluster(100, 100, 100)
    text = preview_text(preview_json(card(), preview(card(), view), view, "not declared"))
    assert (
        text
        == """\
best: about 8.3 tokens a second, 121 ms each
  node-a: layers 0-5, 73 MB of 0.1 GB of memory
  node-b: layers 6-11, 73 MB of 0.1 GB of memory
  1000 tokens of context, in bfloat16
runner-up: about 8.3 tokens a second, 121 ms each
  node-a: layers 0-5, 73 MB of 0.1 GB of memory
  node-c: layers 6-11, 73 MB of 0.1 GB of memory
compared: 2 choices of nodes; none is faster than the best by these figures
why: node-a + node-b, 121 ms a token estimated: node-a layers 0-5, node-b layers 6-11, because no node alone has enough memory (0.15 GB for weights, 1,000 tokens of context and headroom)
drafting: not declared"""  # noqa: E501
    )
    path = "/v1/placements/preview?model=a%2Fb&kv_bits=0&nodes=x%2Cy"
    assert preview_path("a/b", {"kv_bits": 0, "nodes": "x,y", "context": None}) == path
