"""Pings of runners, on this node and on another."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exo_node.node.cluster.member import Member
from exo_node.node.machine.timing import LAN
from exo_node.node.placements import stage_runners
from exo_node.node.placements.stage_runners import ClusterStages
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.errors import PeerLost, PeerRefused
from exo_node.placement.ids import NodeId, PlacementId
from exo_node.proto import peer_pb2 as pb

HERE, THERE = NodeId("here"), NodeId("there")


@dataclass
class HeartbeatTimes:
    """A cluster that only has the heartbeats of each node: their time, and the CPU time in them."""

    seconds: dict[NodeId, float]
    local: "Local"
    self_id: NodeId = HERE
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def knows(self, node: NodeId) -> bool:
        return node == THERE

    async def until_gone(self, _node: NodeId) -> None:
        _ = await self.lost.wait()

    def exchange_s(self, node: NodeId) -> float:
        return self.seconds.get(node, 0.0)

    def stages(self, _: NodeId) -> list[pb.StageState]:
        cpu_s = self.local.cpu_s_of(PlacementId("p"), 0)
        return [pb.StageState(placement="p", cpu_s=cpu_s or 0.0)]


@dataclass
class Runners:
    """Records the timeout of each ping."""

    timeouts: list[float] = field(default_factory=list[float])

    fault: PeerLost | None = None

    async def read_state(self, _stage: Endpoint, _p: PlacementId, _n: int, timeout_s: float) -> Any:
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
    return asyncio.run(stages(exchange_s, local, runners).ping(*of(node)))


def of(node: NodeId) -> tuple[Endpoint, PlacementId, int]:
    return Endpoint(node, pb.LoadReady()), PlacementId("p"), 0


def stages(exchange_s: float, local: Local, runners: Runners) -> ClusterStages:
    cluster, unused = cast(Any, HeartbeatTimes({THERE: exchange_s}, local)), cast(Any, None)
    each = ClusterStages(cast(Any, local), cluster, unused, unused, unused, LAN)
    each.read_state = cast(Any, runners).read_state
    return each


def patience(node: NodeId, exchange_s: float) -> float:
    runners = Runners()
    _ = pinged(node, exchange_s, Local([1.0]), runners)
    [timeout_s] = runners.timeouts
    return timeout_s


@pytest.mark.parametrize("node", [HERE, THERE])
def test_a_runner_that_is_late_and_computes_is_not_lost(node: NodeId) -> None:
    late = Runners(fault=PeerLost("it does not answer"))
    assert pinged(node, 0.0, Local([3.0, 3.01]), late) == pb.RunnerState()


@pytest.mark.parametrize("node", [HERE, THERE])
def test_a_runner_elsewhere_that_is_late_for_long_is_lost_though_it_computes(
    node: NodeId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link may be broken in one direction, while it computes for others."""
    clock, late = [1000.0], PeerLost("it does not answer")
    monkeypatch.setattr(stage_runners, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    runners = Runners(fault=late)
    each = stages(0.0, Local([float(n) for n in range(1, 99)]), runners)

    async def outcomes() -> list[bool]:
        answers = list[bool]()
        for number in range(12):
            runners.fault = None if number == 5 else late
            try:
                answers.append(await each.ping(*of(node)) == pb.RunnerState())
            except PeerLost:
                answers.append(False)
            clock[0] += LAN.stall_s / 5 + 0.1
        return answers

    assert asyncio.run(outcomes()) == [True] * 11 + [node == HERE]


@pytest.mark.parametrize(
    ("node", "fault", "cpu_s"),
    [
        (HERE, PeerLost("it does not answer"), [3.0, 3.0]),  # it stands still
        (HERE, PeerLost("it does not answer"), [3.0, None]),  # it has ended meanwhile
        (HERE, PeerLost("it does not answer"), [None, None]),
        (HERE, PeerRefused("nobody listens"), [3.0, 4.0]),
        (THERE, PeerLost("it does not answer"), [3.0, 3.0]),  # or nothing was heard of it
        (THERE, PeerLost("it does not answer"), [3.0, None]),
        (THERE, PeerRefused("nobody listens"), [3.0, 4.0]),
    ],
)
def test_other_runners_that_do_not_answer_are_lost(
    node: NodeId, fault: PeerLost, cpu_s: list[float | None]
) -> None:
    with pytest.raises(PeerLost):
        _ = pinged(node, 0.0, Local(cpu_s), Runners(fault=fault))


@pytest.mark.parametrize("node", [HERE, THERE])
async def test_a_ping_waits_no_longer_for_a_runner_once_the_cluster_has_lost_its_node(
    node: NodeId,
) -> None:
    answers, runners = asyncio.Event(), Runners()
    each = stages(0.0, Local([1.0, 2.0]), runners)

    async def read_state(*_parts: object) -> pb.RunnerState:
        _ = await answers.wait()
        return pb.RunnerState()

    each.read_state = cast(Any, read_state)
    ping = asyncio.ensure_future(each.ping(*of(node)))
    cast(Any, each)._cluster.lost.set()
    if node == HERE:
        answers.set()
        assert await ping == pb.RunnerState()
    else:
        with pytest.raises(PeerLost, match="was lost"):
            _ = await ping


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
    member.record_answer(0.2, 0.0)
    assert member.exchange_s == 0.2
    for _ in range(20):
        member.record_answer(0.002, 0.0)
    assert member.exchange_s < 0.003
