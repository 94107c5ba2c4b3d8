"""Two real nodes measure links and layers, store them and plan with them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import FakeFacts, FakeStages, leading
from nodes import Node, copy_key, eventually, grpc_address, node, sees

from exo_node.placement.errors import LoadFailed
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.split_refusal import MAY_BE_SPLIT, SplitRefusal
from exo_node.proto import peer_pb2 as pb

PROFILE = "/v1/cluster/profile"
FLAGS = ("--no-mdns", "--dtype", "float32")
WITHIN_S = 120.0
"""Long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    root = tmp_path_factory.mktemp("profiling")
    with (
        node(root / "one", *FLAGS, measures=True) as one,
        node(
            copy_key(one, root / "two"), *FLAGS, "--peer", grpc_address(one), measures=True
        ) as two,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
        yield one, two


def profile(running: Node) -> Any:
    return running.call("GET", PROFILE).body


def reason(running: Node) -> str:
    """The planner's reason for the demo's best placement, whose speed the model list has, too,
    until it is loaded: then it is the speed where it is."""
    best = running.call("GET", "/v1/placements/preview?model=demo").body["best"]
    listed = running.call("GET", "/v1/models").body["data"]
    [fits] = [model["fits"] for model in listed if model["id"] == "demo"]
    speeds = [(round(1 / best["seconds_per_token"], 1), "measured" not in best["reason"])]
    placements = running.call("GET", "/v1/placements").body["data"]
    speeds = [(each["tokens_per_second"], each["estimated"]) for each in placements] or speeds
    assert [(fits["tokens_per_second"], fits["estimated"])] == speeds
    text: str = best["reason"]
    return text


def files(running: Node, kind: str) -> dict[str, int]:
    """Stored files of a kind, with their modification times in ns."""
    paths = (running.data_dir / "profiles").glob(f"{kind}-*.json")
    return {path.name: path.stat().st_mtime_ns for path in paths}


def test_a_link_is_measured_when_a_node_joins(pair: tuple[Node, Node]) -> None:
    one, two = pair
    eventually(lambda: profile(one)["links"], WITHIN_S)
    [link] = profile(one)["links"]
    ids = {n["id"]: n["name"] for n in profile(one)["nodes"]}
    assert {ids[end] for end in link["nodes"]} == {"one", "two"}
    assert link["addresses"] == ["127.0.0.1", "127.0.0.1"]
    assert 0 < link["round_trip_min_s"] <= link["round_trip_s"] < 10
    assert link["bandwidth"] > 1e6
    assert link["chosen"]
    # The other node forwards the request to the head.
    assert profile(two)["links"][0]["nodes"] == link["nodes"]


def test_layers_are_timed_once_on_each_node_and_planned_with(pair: tuple[Node, Node]) -> None:
    one, two = pair
    assert "measured" not in reason(one)
    body = {"model": "demo", "min_nodes": 2}
    placed = one.call("POST", "/v1/placements", body)
    assert placed.status == 200, placed
    eventually(lambda: all(n["layers"] for n in profile(one)["nodes"]), WITHIN_S)
    generator = placed.body["stages"][0]["node"]
    for each in profile(one)["nodes"]:
        [times] = each["layers"]
        assert (times["model"], times["dtype"]) == ("demo", "float32")
        assert 0 < times["decode_s"] < times["prefill_s"] < 60
        assert (times["verify_rows"], times["prefill_rows"]) == (8, 512)
        assert (times["tail_s"] is not None) == (each["id"] == generator)
    written_at = files(one, "layers"), files(two, "layers")
    assert one.call("POST", "/v1/placements", body).status == 200
    assert "measured" in reason(one)
    assert (files(one, "layers"), files(two, "layers")) == written_at


@dataclass
class RefusingOnce(FakeStages, FakeFacts):
    """Refuses the first load, as if the model's class failed its check."""

    loads: int = 0

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        self.loads += 1
        if self.loads == 1:
            raise LoadFailed("it leaks", param="pipeline")
        return await super().load(node, spec, progress)

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        return SplitRefusal("it leaks") if self.loads else MAY_BE_SPLIT


def test_a_model_that_cannot_be_split_is_planned_again_at_once() -> None:
    async def run() -> None:
        cluster = RefusingOnce()
        placements = leading(cluster, cluster)
        record = await placements.place(ModelId("demo"), PlanOptions())
        assert (record.status, cluster.loads) == ("ready", 2)
        assert placements.records == [record]
        await placements.close()

    asyncio.run(run())
