"""Facts of the running node over HTTP, out of a cluster that is made up."""

import asyncio
from types import SimpleNamespace
from typing import Any

from exo_node.node.chat.metrics import Metrics
from exo_node.node.chat.totals import Totals
from exo_node.node.operations import NodeOperations

ABSENT: Any = None


def stage(number: int, weights: int) -> dict[str, object]:
    zeros = dict.fromkeys(
        ("cache_bytes", "prefix_cache_bytes", "prefix_disk_bytes", "peak_memory_bytes"), 0
    )
    zeros |= {f"prefix_{tier}_rows": 0 for tier in ("memory", "disk", "peer")}
    return {"model": "demo", "stage": number, "weight_bytes": weights, **zeros}


class TwoNodes:
    """A cluster in which each node runs one stage."""

    def describe(self) -> dict[str, object]:
        own = {"status": "alive", "self": True, "stages": [stage(1, 700)]}
        other = {"status": "alive", "self": False, "stages": [stage(0, 900)]}
        return {"nodes": [other, own]}


def test_metrics_count_each_node_of_the_cluster_and_the_memory_of_this_one() -> None:
    local: Any = SimpleNamespace(version="1", library=None)
    peering: Any = SimpleNamespace(cluster=TwoNodes())
    placements: Any = SimpleNamespace(records=[])
    metrics = Metrics(Totals(), lambda: 0.0)
    operations = NodeOperations(local, peering, placements, ABSENT, ABSENT, metrics, ABSENT)
    text = asyncio.run(operations.metrics())[0].decode()
    assert 'exo_node_nodes{status="alive"} 2.0' in text
    weights = [row for row in text.splitlines() if "weight" in row and not row.startswith("#")]
    assert [row.split()[-1] for row in weights] == ["700.0"]
