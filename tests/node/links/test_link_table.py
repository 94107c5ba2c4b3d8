"""The quickest of several paths between two nodes, for the planner and the stages."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exo_node.node.cluster.member import MemberFacts
from exo_node.node.links.layer_profiles import LayerProfiles
from exo_node.node.links.measurements import Profiling
from exo_node.node.links.paths import fastest, link_facts, link_paths, nearest
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.planner_view import NodeFactsSource, node_facts, with_kin_profiles
from exo_node.placement.cluster import OWN, LayerProfile, MeasuredLayer, NodeFacts
from exo_node.placement.drafting import EnabledState
from exo_node.placement.gpu_faults import ChunkLimit
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.split_refusal import SplitRefusal
from exo_node.proto import peer_pb2 as pb

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
DEMO = ModelId("demo")


def report(peer: NodeId, net: int, p50_s: float = 1e-3, rate: float = 1e8) -> pb.LinkReport:
    """A report over network `net`, in which every node has its own last number."""
    return pb.LinkReport(
        peer=peer,
        from_address=f"10.0.{net}.1",
        to_address=f"10.0.{net}.2",
        echoes=[pb.Echoes(bytes=1024, count=30, min_s=p50_s / 2, p50_s=p50_s)],
        bandwidth_out=rate,
        bandwidth_in=2 * rate,
    )


def members(*reports: pb.LinkReport, **more: Any) -> list[pb.NodeFacts]:
    """Three nodes, of which the first reports links."""
    return [pb.NodeFacts(id=A, links=reports, **more), pb.NodeFacts(id=B), pb.NodeFacts(id=C)]


WIFI = report(B, 0, 4e-3, 3e7)
CABLE = report(B, 1, 4e-4, 1.2e8)
THUNDERBOLT = report(B, 2, 5e-4, 2e9)


@pytest.mark.parametrize(
    ("reports", "network"),
    [
        ((WIFI,), 0),
        ((WIFI, CABLE), 1),
        ((CABLE, WIFI), 1),
        # A little slower to answer, and a prefill chunk takes a tenth of the time.
        ((CABLE, THUNDERBOLT, WIFI), 2),
        # Not measured is not infinitely fast.
        ((WIFI, report(B, 3, 1e-4, 0.0)), 0),
    ],
)
def test_both_ends_take_the_quickest_path(reports: tuple[pb.LinkReport, ...], network: int) -> None:
    facts = members(*reports)
    path = fastest(link_paths(facts), A, B)
    assert path is not None and path == fastest(link_paths(facts), B, A)
    assert path.address_of(B) == f"10.0.{network}.2"
    assert path.address_of(A) == f"10.0.{network}.1"
    assert fastest(link_paths(facts), A, C) is None
    [link] = link_facts(facts)
    assert {link.a, link.b} == {A, B}
    assert link.round_trip_s == path.round_trip_s
    assert link.bandwidth == path.bandwidth


def test_the_slower_direction_counts() -> None:
    [path] = link_paths(members(report(B, 0, 1e-3, 1e8)))
    assert path.bandwidth == 1e8


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf, 1e13])
def test_a_peers_invalid_figures_are_ignored(wrong: float) -> None:
    assert link_paths(members(report(B, 0, wrong))) == []
    assert link_paths(members(report(B, 0, 1e-3, wrong))) == []
    assert link_paths(members(pb.LinkReport(peer=B))) == []


def test_links_to_nodes_that_are_gone_and_to_itself_do_not_count() -> None:
    assert link_paths(members(report(NodeId("gone"), 0), report(A, 0))) == []


def test_a_runner_is_called_on_the_quickest_path_if_it_listens_there() -> None:
    facts = members(WIFI, THUNDERBOLT)
    usual = pb.LoadReady(host="10.0.0.2", port=1, pid=7)
    usual.addresses.extend(
        [pb.Address(host="10.0.0.2", port=1), pb.Address(host="10.0.2.2", port=2)]
    )
    near = nearest(facts, A, B, usual)
    assert (near.host, near.port, near.pid) == ("10.0.2.2", 2, 7)
    assert (usual.host, usual.port) == ("10.0.0.2", 1)
    assert nearest(facts, C, B, usual) == usual
    del usual.addresses[1]
    assert nearest(facts, A, B, usual) == usual


# ------------------------------------------------------------------ what the planner gets


def times(
    model: str = "demo", decode_s: float = 1e-3, tail_s: float = 2e-3, layer_bytes: int = 0
) -> pb.LayerTimes:
    return pb.LayerTimes(
        model=model,
        dtype="float32",
        decode_s=decode_s,
        verify_s=2e-3,
        verify_rows=4,
        prefill_s=0.1,
        prefill_rows=512,
        tail_s=tail_s,
        layer_bytes=layer_bytes,
    )


PROFILE = LayerProfile(1e-3, 2e-3, 0.1, 2e-3, verify_rows=4)


@pytest.mark.parametrize(
    ("layer_times", "profile"),
    [
        ([], None),
        ([times("other")], None),
        ([times()], PROFILE),
        ([times(decode_s=5.0), times()], PROFILE),
        ([times(decode_s=math.nan)], None),
        ([times(decode_s=-1.0)], None),
        ([times(decode_s=0.0)], None),
    ],
)
def test_the_planner_gets_the_last_measurement_of_the_model(
    layer_times: list[pb.LayerTimes], profile: LayerProfile | None
) -> None:
    facts = pb.NodeFacts(id=A, profiles=layer_times)
    assert node_facts(MemberFacts(facts), DEMO).profile == profile


def node(name: str, chip: str, profile: LayerProfile | None) -> NodeFacts:
    return NodeFacts(NodeId(name), name, 1, 1.0, "metal", chip, profile=profile)


def test_nodes_of_one_chip_share_the_least_of_their_times() -> None:
    fast, slow = LayerProfile(1.0, 4.0, 9.0, 0.0), LayerProfile(2.0, 3.0, 9.0, 5.0)
    shared = with_kin_profiles(
        [
            node("a", "M4", fast),
            node("b", "M4", slow),
            node("c", "M4", None),
            node("d", "M1", None),
            node("e", "", slow),
            node("f", "", None),
        ]
    )
    least = LayerProfile(1.0, 3.0, 9.0, 5.0)
    assert [n.profile for n in shared] == [least, least, least, None, slow, None]


def test_kin_share_the_verify_of_the_most_rows() -> None:
    """One was kept from a time when fewer were drafted."""
    profiles = [LayerProfile(1.0, 3.0, verify_rows=4), LayerProfile(1.0, 4.0, verify_rows=8)]
    shared = with_kin_profiles([node("a", "M4", profiles[0]), node("b", "M4", profiles[1])])
    assert [n.profile for n in shared] == profiles[1:] * 2


def test_kin_share_times_of_one_dtype_only() -> None:
    wide, narrow = LayerProfile(1.0, 4.0, 9.0, 5.0), LayerProfile(2.0, 3.0, 9.0, 5.0)
    shared = with_kin_profiles(
        [
            replace(node("a", "Xeon", wide), profile_dtype="float32"),
            replace(node("b", "Xeon", narrow), profile_dtype="bfloat16"),
            node("c", "Xeon", None),
        ]
    )
    assert [n.profile for n in shared[:2]] == [wide, narrow]
    assert (shared[2].profile, shared[2].profile_dtype) in ((wide, "float32"), (narrow, "bfloat16"))


def test_the_planner_gets_dtypes_and_products() -> None:
    facts = pb.NodeFacts(id=A, dtype="float16", float32_products="none", profiles=[times()])
    planned = node_facts(MemberFacts(facts), DEMO)
    assert (planned.dtype, planned.float32_products) == ("float16", "none")
    assert (planned.profile_dtype, planned.prefill_s) == ("float32", 0.1)
    old = node_facts(MemberFacts(pb.NodeFacts(id=A)), DEMO)
    assert (old.dtype, old.float32_products, old.profile_dtype) == ("auto", "", "")


class UnusedClient:
    """A client that measures nothing."""

    async def measure(self) -> None: ...


def started(folder: Path) -> Profiling:
    """The profiling of a node whose profiles are in `folder`."""
    nothing: Any = UnusedClient()
    profiles = LayerProfiles(folder, "cpu", "1")
    return Profiling(A, [], profiles, nothing, lambda: 0.0, LOCAL)


async def test_layers_are_timed_at_the_first_load_only(tmp_path: Path) -> None:
    async def timed(profiling: Profiling) -> bool:
        """Whether a load has to time its layers."""
        spec = pb.StageSpec(placement="p", model="demo", dtype="float32", layer_bytes=1000)

        async def load() -> pb.LoadReady:
            return pb.LoadReady(layers=times() if spec.measure_layers else None)

        _ = await profiling.load(spec, "f", load)
        return spec.measure_layers

    profiling = started(tmp_path)
    assert [await timed(profiling) for _ in range(2)] == [True, False]
    for node in (profiling, started(tmp_path)):
        assert list(node.add_to(pb.NodeFacts(id=A)).profiles) == [times(layer_bytes=1000)]
        assert not await timed(node)


@pytest.mark.parametrize(
    ("limited", "later"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"checkpoint_sha256": "f1"}, {"checkpoint_sha256": "f2"}),
        ({"model": "copy"}, {"model": "demo"}),
    ],
    ids=["two dtypes", "two checkpoints", "two models of one checkpoint"],
)
async def test_a_head_sees_every_limit_that_its_loads_are_refused_by(
    tmp_path: Path, limited: dict[str, Any], later: dict[str, Any]
) -> None:
    """Else it would plan the same chunk for ever: such a refusal is no failure of the load."""

    async def measured(spec: pb.StageSpec) -> pb.LoadReady:
        layers = times(spec.model)
        layers.dtype = spec.dtype
        return pb.LoadReady(layers=layers)

    async def load(spec: pb.StageSpec) -> None:
        own = pb.StageSpec.FromString(spec.SerializeToString())
        _ = await profiling.load(own, own.checkpoint_sha256, lambda: measured(own))

    profiling = started(tmp_path)
    fields: dict[str, Any] = {"model": "demo", "checkpoint_sha256": "f1", "dtype": "float32"}
    first, second = (pb.StageSpec(**(fields | own), prefill_chunk=512) for own in (limited, later))
    await load(second)
    await load(first)
    assert profiling.limit_chunk(first, "watchdog") == ChunkLimit(256, "watchdog")
    for spec in (second, first, second):
        facts = profiling.add_to(pb.NodeFacts(id=A))
        known = node_facts(MemberFacts(facts), ModelId(spec.model)).chunk_limit
        spec.prefill_chunk = min(spec.prefill_chunk, known.rows) if known else spec.prefill_chunk
        await load(spec)  # raises LoadFailed where the head did not know it
    assert first.prefill_chunk == 256


async def test_a_fault_of_a_measurement_is_counted_and_shortens_no_chunk(tmp_path: Path) -> None:
    profiling = started(tmp_path)
    spec = pb.StageSpec(model="demo", checkpoint_sha256="f1", dtype="float32", prefill_chunk=512)
    for fault in ("watchdog", "memory"):
        assert profiling.limit_chunk(spec, fault, is_measured=True) is None
        assert profiling.gpu_faults["demo", fault] == 1
    assert profiling.limit_chunk(spec, "watchdog") == ChunkLimit(256, "watchdog")


async def test_the_products_that_a_load_has_taken_change_no_dtype(tmp_path: Path) -> None:
    """A timing decides whether a load takes them, and a dtype decides bits."""
    profiling = started(tmp_path)

    async def load() -> pb.LoadReady:
        return pb.LoadReady()

    spec = pb.StageSpec(placement="p", model="m", dtype="float32")
    _ = await profiling.load(spec, "f", load)
    facts = profiling.add_to(pb.NodeFacts(id=A, float32_products=OWN))
    assert facts.float32_products == OWN


def source_of(facts: list[pb.NodeFacts], *, mtp: bool = True) -> NodeFactsSource:
    nothing: Any = None
    members = [MemberFacts(facts) for facts in facts]
    cluster: Any = SimpleNamespace(self_id=A, head=A, members=lambda: members)
    fixed = dict[str, bool]()
    switches: Any = SimpleNamespace(mtp=lambda: EnabledState(mtp), fixed=fixed.get)
    return NodeFactsSource(cluster, nothing, switches, nothing)


def test_a_node_that_was_probed_while_busy_is_planned_as_its_kin() -> None:
    facts = [
        pb.NodeFacts(id=A, chip="M4", profiles=[times()]),
        pb.NodeFacts(id=B, chip="M4", profiles=[times(decode_s=9e-3)]),
    ]
    view = source_of(facts).view(DEMO)
    assert [view.node(n).profile for n in (A, B)] == [PROFILE] * 2


def test_the_view_has_links_profiles_and_refusals() -> None:
    facts = members(CABLE, WIFI, profiles=[times()], chip="M4")
    facts[1].split_refusals.append(pb.SplitRefusal(model="demo", reason="it leaks"))
    source = source_of(facts)
    view = source.view(DEMO)
    assert view.node(A).profile is not None
    assert view.node(B).profile is None
    assert [link.round_trip_s for link in view.links] == [4e-4]
    assert source.split_refusal(DEMO) == SplitRefusal("it leaks")
    assert not source.split_refusal(ModelId("other"))


def test_the_strictest_refusal_of_a_split_holds() -> None:
    facts = members(CABLE, WIFI)
    facts[0].split_refusals.append(pb.SplitRefusal(model="demo", reason="a", borders=[4, 8]))
    facts[1].split_refusals.append(pb.SplitRefusal(model="demo", reason="b", borders=[8]))
    assert source_of(facts).split_refusal(DEMO) == SplitRefusal("b", frozenset([8]))


def test_a_model_without_a_profile_is_estimated_by_those_that_were_measured() -> None:
    def measured(model: str, dtype: str, nbytes: int, decode_s: float) -> pb.LayerTimes:
        return pb.LayerTimes(model=model, dtype=dtype, layer_bytes=nbytes, decode_s=decode_s)

    profiles = [
        measured("middle", "float32", 500, 3e-3),
        measured("large", "float32", 900, 4e-3),
        measured("small", "float32", 100, 2e-3),
        measured("half", "bfloat16", 50, 1e-3),
        measured("old", "float32", 0, 1e-3),
        measured("nonsense", "float32", 10, 1e9),
        measured("nothing", "float32", 10, 0.0),
    ]
    facts = [pb.NodeFacts(id=A, profiles=profiles), pb.NodeFacts(id=B), pb.NodeFacts(id=C)]
    facts[2].backend = "metal"
    view = source_of(facts).view(DEMO)
    layers = (
        MeasuredLayer(50, 1e-3, "bfloat16"),
        MeasuredLayer(100, 2e-3, "float32"),
        MeasuredLayer(900, 4e-3, "float32"),
    )
    assert [view.node(each).measured for each in (A, B, C)] == [layers, layers, ()]


def test_a_node_whose_operator_lets_no_model_draft_is_not_expected_to() -> None:
    facts = [pb.NodeFacts(id=A), pb.NodeFacts(id=B, native_mtp_variable="1"), pb.NodeFacts(id=C)]
    view = source_of(facts, mtp=False).view(DEMO)
    assert [view.node(node).drafts for node in (A, B, C)] == [False, True, False]
