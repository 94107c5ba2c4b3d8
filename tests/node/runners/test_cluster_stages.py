"""The timeout of a ping to a runner on another node."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from exo_node.node.cluster.member import Member
from exo_node.node.machine.timing import LAN
from exo_node.node.placements.stage_runners import ClusterStages
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.ids import NodeId, PlacementId
from exo_node.proto import peer_pb2 as pb

HERE, THERE = NodeId("here"), NodeId("there")


@dataclass
class HeartbeatTimes:
    """A cluster that only has the time of the heartbeats to each node."""

    seconds: dict[NodeId, float]
    self_id: NodeId = HERE

    def exchange_s(self, node: NodeId) -> float:
        return self.seconds.get(node, 0.0)


@dataclass
class Runners:
    """Records the timeout of each ping."""

    timeouts: list[float] = field(default_factory=list[float])

    async def ping(self, _stage: Endpoint, _p: PlacementId, _n: int, timeout_s: float) -> Any:
        self.timeouts.append(timeout_s)
        return pb.RunnerState()


def patience(node: NodeId, exchange_s: float) -> float:
    runners, unused = Runners(), cast(Any, None)
    cluster = cast(Any, HeartbeatTimes({THERE: exchange_s}))
    stages = ClusterStages(unused, cluster, unused, cast(Any, runners), unused, LAN)
    _ = asyncio.run(stages.ping(Endpoint(node, pb.LoadReady()), PlacementId("p"), 0))
    [timeout_s] = runners.timeouts
    return timeout_s


@pytest.mark.parametrize(
    ("node", "exchange_s", "expected_s"),
    [(HERE, 0.0, 4.0), (THERE, 0.0, 4.0), (THERE, 0.002, 4.0), (THERE, 0.75, 7.5)],
)
def test_a_ping_waits_four_seconds_and_longer_where_heartbeats_take_long(
    node: NodeId, exchange_s: float, expected_s: float
) -> None:
    assert patience(node, exchange_s) == expected_s


def test_the_exchange_time_follows_the_last_heartbeats() -> None:
    member = Member("10.0.0.2:1", pb.Heartbeat())
    member.record_answer(0.2, 0.0, 0.0)
    assert member.exchange_s == 0.2
    for _ in range(20):
        member.record_answer(0.002, 0.0, 0.0)
    assert member.exchange_s < 0.003
