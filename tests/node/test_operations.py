"""Facts of the running node over HTTP, out of a cluster that is made up."""

import asyncio
from types import SimpleNamespace
from typing import Any

from exo_node.node.chat.metrics import Metrics
from exo_node.node.chat.totals import Totals
from exo_node.node.cluster.member import MemberFacts
from exo_node.node.operations import NodeOperations
from exo_node.proto import peer_pb2 as pb

ABSENT: Any = None


def member(node: str, stage: int, weights: int) -> MemberFacts:
    state = pb.StageState(model="demo", stage=stage, weight_bytes=weights)
    return MemberFacts(pb.NodeFacts(id=node), [state])


class TwoNodes:
    """A cluster in which each node runs one stage."""

    def describe(self) -> dict[str, object]:
        return {"nodes": [{"status": "alive"}, {"status": "alive"}]}

    def reports(self) -> list[MemberFacts]:
        return [member("own", 1, 700), member("other", 0, 900)]


def test_metrics_count_each_node_of_the_cluster_and_the_memory_of_this_one() -> None:
    profiling = SimpleNamespace(gpu_faults={("demo", "watchdog"): 2})
    local: Any = SimpleNamespace(version="1", library=None, profiling=profiling)
    peering: Any = SimpleNamespace(cluster=TwoNodes())
    placements: Any = SimpleNamespace(records=[])
    metrics = Metrics(Totals(), lambda: 0.0)
    operations = NodeOperations(local, peering, placements, ABSENT, metrics, ABSENT)
    text = asyncio.run(operations.metrics())[0].decode()
    assert 'exo_node_nodes{status="alive"} 2.0' in text
    weights = [row for row in text.splitlines() if "weight" in row and not row.startswith("#")]
    assert [row.split()[-1] for row in weights] == ["700.0"]
    assert 'exo_node_gpu_faults_total{fault="watchdog",model_name="demo"} 2.0' in text
