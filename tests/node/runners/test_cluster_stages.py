"""Pings of runners, on this node and on another."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from exo_node.node.cluster.member import Member
from exo_node.node.machine.timing import LAN
from exo_node.node.placements.stage_runners import ClusterStages
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.errors import PeerLost, PeerRefused
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

    fault: PeerLost | None = None

    async def ping(self, _stage: Endpoint, _p: PlacementId, _n: int, timeout_s: float) -> Any:
        self.timeouts.append(timeout_s)
        if self.fault is not None:
            raise self.fault
        return pb.RunnerState()


@dataclass
class Local:
    """This node's runner, with its CPU time at each look; None: it has ended."""

    cpu_s: list[float | None]

    def cpu_s_of(self, _: PlacementId, _number: int) -> float | None:
        return self.cpu_s.pop(0) if self.cpu_s else None


def pinged(node: NodeId, exchange_s: float, local: Local, runners: Runners) -> pb.RunnerState:
    cluster, unused = cast(Any, HeartbeatTimes({THERE: exchange_s})), cast(Any, None)
    parts = (cast(Any, local), cluster, unused, cast(Any, runners), unused, LAN)
    ping = ClusterStages(*parts).ping(Endpoint(node, pb.LoadReady()), PlacementId("p"), 0)
    return asyncio.run(ping)


def patience(node: NodeId, exchange_s: float) -> float:
    runners = Runners()
    _ = pinged(node, exchange_s, Local([1.0]), runners)
    [timeout_s] = runners.timeouts
    return timeout_s


def test_a_runner_here_that_is_late_and_computes_is_not_lost() -> None:
    late = Runners(fault=PeerLost("it does not answer"))
    assert pinged(HERE, 0.0, Local([3.0, 3.01]), late) == pb.RunnerState()


@pytest.mark.parametrize(
    ("node", "fault", "cpu_s"),
    [
        (HERE, PeerLost("it does not answer"), [3.0, 3.0]),  # it stands still
        (HERE, PeerLost("it does not answer"), [3.0, None]),  # it has ended meanwhile
        (HERE, PeerLost("it does not answer"), [None, None]),
        (HERE, PeerRefused("nobody listens"), [3.0, 4.0]),
        (THERE, PeerLost("it does not answer"), [3.0, 4.0]),  # another machine's CPU time
    ],
)
def test_other_runners_that_do_not_answer_are_lost(
    node: NodeId, fault: PeerLost, cpu_s: list[float | None]
) -> None:
    with pytest.raises(PeerLost):
        _ = pinged(node, 0.0, Local(cpu_s), Runners(fault=fault))


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
