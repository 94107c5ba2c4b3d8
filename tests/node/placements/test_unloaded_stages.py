"""Memory of another node's stage: free once that node has answered its unload."""

from typing import Any

import pytest
from test_bounds import Node

from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.planner_view import node_facts
from exo_node.node.placements.stage_runners import ClusterStages
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.proto import peer_pb2 as pb

B, MEMORY = NodeId("b"), 1_000
KEY = (B, PlacementId("p-1"), 0)


class Other:
    """A client of node b, which answers or is lost."""

    def __init__(self) -> None:
        self.lost = False

    async def unload(self, *_: Any, kill: bool = False) -> None:
        if self.lost:
            raise PeerLost("b does not answer")

    async def load(self, *_: Any) -> pb.LoadReady:
        return pb.LoadReady()


class Profiling:
    async def record_refusal(self, _: str, loading: Any) -> pb.LoadReady:
        return await loading

    def quickest(self, _: NodeId, stage: Any) -> Any:
        return stage


class Head:
    """Node a, which leads and calls b."""

    def __init__(self) -> None:
        self.node, self.other = Node(), Other()
        parts: dict[str, Any] = {
            "local": None,
            "client": self.other,
            "channels": None,
            "profiling": Profiling(),
        }
        cluster = self.node.cluster
        self.stages = ClusterStages(cluster=cluster, timing=LOCAL, **parts)
        self.beat("p-1")

    def beat(self, *placements: str) -> None:
        """Stages in the heartbeats of b."""
        stages = [pb.StageState(placement=p, model="demo", weight_bytes=500) for p in placements]
        sender = pb.NodeFacts(id=B, name=B, host="127.0.0.1", port=2, memory_bytes=MEMORY)
        _ = self.node.answer_heartbeat(B, pb.Heartbeat(sender=sender, boot_id=1, placements=stages))

    @property
    def free(self) -> int:
        """Bytes of b that another model may take."""
        [b] = self.node.cluster.others()
        return node_facts(b, ModelId("other")).memory_bytes


async def test_an_answered_unload_frees_the_room_before_the_next_heartbeat() -> None:
    head = Head()
    before = head.free
    assert before < MEMORY
    await head.stages.unload(*KEY)
    assert head.free == MEMORY
    head.beat("p-1")  # was under way when the unload was answered
    assert head.free == MEMORY


async def test_an_unload_without_an_answer_frees_nothing() -> None:
    head = Head()
    before, head.other.lost = head.free, True
    with pytest.raises(PeerLost):
        await head.stages.unload(*KEY)
    assert head.free == before


@pytest.mark.parametrize("has_heartbeat", [True, False], ids=["after a heartbeat", "at once"])
async def test_a_stage_that_is_loaded_there_again_counts(has_heartbeat: bool) -> None:
    head = Head()
    before = head.free
    await head.stages.unload(*KEY)
    if has_heartbeat:
        head.beat()
        head.beat("p-1")
        assert head.free == before, "the heartbeats agreed, so the next ones count"
        await head.stages.unload(*KEY)
    _ = await head.stages.load(B, pb.StageSpec(placement="p-1", stage=0), lambda _: None)
    head.beat("p-1")
    assert head.free == before
