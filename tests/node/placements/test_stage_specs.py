"""`exo-node bench` and `exo-node verify` examine exactly what a node of this machine runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.cluster.member import MemberFacts
from exo_node.node.links.measurements import Profiling
from exo_node.node.local_node import LocalNode
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.hardware import detect_hardware
from exo_node.node.machine.settings import installed_distributions, load_settings
from exo_node.node.machine.timing import LAN
from exo_node.node.placements.local_model import resolve
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.planner_view import NodeFactsSource, node_facts
from exo_node.node.placements.stage_runners import LocalStages
from exo_node.node.placements.stage_specs import (
    LEAST_MARGIN,
    StageSettings,
    build_specs,
    on_this_machine,
)
from exo_node.node.placements.stages import Stages
from exo_node.node.rpc.model_files import ModelFilesClient
from exo_node.node.runners.supervisor import Supervisor
from exo_node.node.store.fetching import ModelFetcher
from exo_node.placement.cluster import OWN as CPU_PRODUCTS
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.cost import ModelSizes
from exo_node.placement.drafting import EnabledState
from exo_node.placement.errors import ExoNodeError
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.plan import plan, planned_bytes
from exo_node.proto import peer_pb2 as pb

OWN = (
    "placement",
    "plan",
    "profile_folder",
    "prefix_folder",
    "prefix_disk_bytes",
    "listen",
    "measure_layers",
    "dtype_reason",
)
"""Fields about one load and its node, its addresses and its measurements: no answer depends on
them."""


class Runners:
    """Notes what the first runner is told, and does not start it."""

    def __init__(self) -> None:
        self.told: list[pb.StageSpec] = []

    async def load(self, spec: pb.StageSpec, _: Any) -> pb.LoadReady:
        self.told.append(spec)
        return pb.LoadReady(mtp_head="loaded")


class Measuring:
    """Loads as the real profiling does, and measures nothing."""

    async def load(
        self, _spec: pb.StageSpec, _checkpoint: str, load: Callable[[], Awaitable[pb.LoadReady]]
    ) -> pb.LoadReady:
        return await load()


class OnThisNode:
    """`Stages` of a cluster of one."""

    def __init__(self, local: LocalStages) -> None:
        self._local = local

    async def load(self, _: NodeId, spec: pb.StageSpec, progress: Any) -> pb.LoadReady:
        return await self._local.load(spec, progress)

    async def enter(self, *_: object) -> None: ...


async def of_a_node(environment: Mapping[str, str], folder: Path) -> pb.StageSpec:
    """The specification that a node with those settings sends to the runner of the demo."""
    settings = load_settings({"data_dir": str(folder)}, environment)
    hardware = detect_hardware(installed_distributions(), settings.memory_limit)
    local, runners = LocalNode(settings, hardware), Runners()
    nobody = cast(ModelFilesClient, None)  # nothing is copied where the model is
    fetcher = ModelFetcher(
        local.library, nobody, lambda _: (), EventLog(), folder / "models", may_download=False
    )
    stages = LocalStages(settings, fetcher, cast(Profiling, Measuring()), cast(Supervisor, runners))
    own = MemberFacts(local.facts(), head=local.id)
    # No supervisor lists the runner, so the node reports no stages.
    unasked = replace(own, stages=cast(Any, None))
    cluster = SimpleNamespace(
        self_id=local.id, head=local.id, members=lambda: [own], reports=lambda: [unasked]
    )
    facts = NodeFactsSource(cast(Any, cluster), local.library, local.switches, fetcher)
    placements = Placements(
        cast(Stages, OnThisNode(stages)), facts, LAN, EventLog(), DesiredPlacements()
    )
    placements.lead(local.id, 1, adopts=False)
    _ = await placements.ensure(ModelId("demo"))
    [spec] = runners.told
    return spec


def without_own(spec: pb.StageSpec) -> pb.StageSpec:
    for name in OWN:
        spec.ClearField(name)
    return spec


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"EXO_NATIVE_MTP_ENABLED": "0"},
        {"EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL": "0"},
        {"EXO_DTYPE": "bfloat16"},
        {"EXO_KERNELS": "mlx"},
        {"EXO_PROMPT_LOOKUP_ENABLED": "0"},
    ],
    ids=lambda variables: ",".join(variables) or "defaults",
)
def test_the_commands_examine_what_a_node_runs(variables: dict[str, str], tmp_path: Path) -> None:
    environment = {**variables, "EXO_MEMORY_LIMIT": "2GB", "EXO_OFFLINE": "1"}
    settings = load_settings({"data_dir": str(tmp_path)}, environment)
    examined = resolve("demo", settings, installed_distributions()).spec
    run = asyncio.run(of_a_node(environment, tmp_path))
    assert without_own(examined) == without_own(run)


def absent(drafter: ModelId) -> Path:
    raise AssertionError(drafter)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, ""),
        ({"EXO_NATIVE_MTP_ENABLED": "0"}, ""),  # a switch of its own
        ({"EXO_PROMPT_LOOKUP_ENABLED": "0"}, "EXO_PROMPT_LOOKUP_ENABLED=0"),
    ],
)
def test_a_machine_decides_whether_it_copies_and_says_why_not(
    variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    settings = load_settings({"data_dir": str(tmp_path)}, variables)
    own_spec = pb.StageSpec(prompt_lookup=True, lookup_off_reason="a peer's")
    spec = on_this_machine(own_spec, tmp_path, settings, absent)
    assert spec.prompt_lookup == (not reason)
    assert (reason in spec.lookup_off_reason) if reason else not spec.lookup_off_reason


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", (False, False, False)),
        ("copies", (True, False, False)),
        ("1", (True, True, False)),
        (" Any ", (True, True, True)),
    ],
)
def test_a_machine_decides_with_which_others_it_reads(
    value: str, expected: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    settings = load_settings({"data_dir": str(tmp_path)}, {"EXO_READERS": value})
    local = LocalNode(settings, detect_hardware(installed_distributions(), 2 * 10**9))
    facts = node_facts(MemberFacts(local.facts(), []), ModelId("m"))
    assert (facts.reads, facts.keeps_readers, facts.reads_any) == expected
    spec = on_this_machine(pb.StageSpec(reads_any=True), tmp_path, settings, absent)
    assert spec.reads_any is expected[-1]


@pytest.mark.parametrize(
    ("planned", "allowed", "limit"),
    [
        (0, 0, 0),
        (0, 7 * 10**9, 7 * 10**9),
        (20 * 10**9, 0, 21 * 10**9),
        (20 * 10**9, 7 * 10**9, 7 * 10**9),
        (10**6, 7 * 10**9, 10**6 + LEAST_MARGIN),
    ],
)
def test_a_runner_may_take_little_more_memory_than_planned(
    planned: int, allowed: int, limit: int, tmp_path: Path
) -> None:
    """Or what its operator allows, if that is less."""
    environment = {"EXO_MEMORY_LIMIT": str(allowed)} if allowed else {}
    settings = load_settings({"data_dir": str(tmp_path)}, environment)
    stages = [pb.PlannedStage(memory_bytes=1), pb.PlannedStage(memory_bytes=planned)]
    own_spec = pb.StageSpec(stage=1, plan=pb.PlacementPlan(stages=stages))
    assert on_this_machine(own_spec, tmp_path, settings, absent).memory_limit_bytes == limit


@pytest.mark.parametrize("value", ["2", "all", "any,1", "copies\x00", "none"])
def test_a_value_of_readers_that_does_not_exist_is_refused_by_name(
    value: str, tmp_path: Path
) -> None:
    with pytest.raises(ExoNodeError, match=r"EXO_READERS.*0, copies, 1, any"):
        _ = load_settings({"data_dir": str(tmp_path)}, {"EXO_READERS": value})


def test_prefixes_have_room_for_a_context_and_the_states_at_its_borders_within_the_plan() -> None:
    """Recurrent states are nobody's cache: without room for them the second turn of a conversation
    that fills half of the context would read all of it again."""
    card = packaged_cards()[ModelId("demo")]
    here = NodeFacts(NodeId("a"), "a", 10**9, 1e9, "cpu", float32_products=CPU_PRODUCTS)
    placement = plan(card, ClusterView((here,)))
    [spec] = build_specs(
        *(PlacementId("p"), card, placement, StageSettings(), EnabledState(True)),
        fingerprint="",
        lease_s=1,
    )
    assert spec.dtype == "float32"
    wide = card.computed_in("float32")
    caches = ModelSizes.of(wide, 4096).caches(0, 16, mtp=True)
    states = 8 * 12 * 4 * 64 * 64 * 4
    assert spec.prefix_cache_bytes >= caches + states
    weights = 16 * wide.mean_layer_bytes + wide.endpoint_bytes + wide.mtp_bytes
    spare_bytes = planned_bytes(card, placement, 0) - weights - spec.prefix_cache_bytes
    assert spare_bytes >= planned_bytes(card, placement, 0) // 12 - 2, (
        "a chunk's half of the headroom"
    )
