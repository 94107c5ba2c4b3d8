"""What heads and live nodes exchange: desires, elections, heartbeats."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from simulated import Disk

from exo_node.node.cluster.cluster import Cluster
from exo_node.node.cluster.cluster_state import ClusterState
from exo_node.node.cluster.desired import Desired, DesiredPlacements
from exo_node.node.cluster.exchanges import QUICK_TRIES, Calls, Exchanges, News
from exo_node.node.cluster.member import MemberFacts
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import ModelId, NodeId, Term
from exo_node.proto import peer_pb2 as pb

Call = Callable[[pb.Heartbeat], pb.Heartbeat]


class Way:
    """A client that reaches one node, once `call` is set."""

    def __init__(self) -> None:
        self.call: Call | None = None

    async def exchange(self, _: str, __: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        if self.call is None:
            raise PeerLost("nobody is there")
        return self.call(beat)


class Head:
    """A real Cluster that leads alone, under the term after `term`, and desires one model."""

    def __init__(self, name: str, term: int) -> None:
        self.id, self.way, self.events = NodeId(name), Way(), EventLog()
        self.desired = DesiredPlacements()
        self.desired.note(Desired(ModelId(f"model-{name}")))
        client: Any = self.way
        self.cluster = Cluster(
            lambda: MemberFacts(pb.NodeFacts(id=name, name=name, host="127.0.0.1", port=ord(name))),
            client,
            ClusterState(self.id, 1000, Disk(Term(term)), 0.0, LOCAL, wait_s=0.0),
            lambda _, __: None,
            self.events,
            self.desired,
            Loops(self.events, LOCAL),
        )
        self.cluster.start()


@pytest.mark.parametrize("caller", ["the winner", "the loser"])
async def test_the_winner_receives_the_losers_desires_from_either_call(caller: str) -> None:
    loser, winner = Head("a", 1), Head("b", 7)
    try:
        assert loser.cluster.is_head and winner.cluster.is_head
        first, second = (winner, loser) if caller == "the winner" else (loser, winner)
        first.way.call = lambda beat: second.cluster.answer(first.id, beat)
        first.cluster.dial(f"127.0.0.1:{ord(second.id)}", second.id)
        async with asyncio.timeout(60):
            while loser.cluster.head != winner.id or winner.cluster.leads(loser.id):
                await asyncio.sleep(0.01)
        assert list(winner.desired.take(winner.cluster.leads)) == ["model-a"]
        assert winner.cluster.is_head
    finally:
        for each in (loser, winner):
            await each.cluster.close()


@pytest.mark.parametrize(
    ("others", "text"),
    [([], "no other node is here to lead"), (["b"], "electing another one")],
    ids=["alone", "with another node"],
)
async def test_a_head_that_leaves_names_an_election_only_where_another_node_is(
    others: list[str], text: str
) -> None:
    head = Head("a", 1)
    for name in others:
        sender = pb.NodeFacts(id=name, name=name, host="127.0.0.1", port=2)
        _ = head.cluster.answer(NodeId(name), pb.Heartbeat(sender=sender))
    head.cluster.leave()
    statuses = {node["id"]: node["status"] for node in head.cluster.describe()["nodes"]}
    assert statuses == {"a": "draining", **dict.fromkeys(others, "alive")}
    await head.cluster.close()
    [election] = [event.text for event in head.events.entries() if event.kind == "election"]
    assert text in election


HERE, THERE = NodeId("a" * 20), NodeId("b" * 20)
ADDRESS = "10.0.0.2:52416"
TIMING = replace(LOCAL, heartbeat_s=3600.0, tick_s=0.0)
"""A second try follows at once or not during a test."""


@dataclass
class EverySecond:
    """A control client whose every second heartbeat is answered."""

    count: int = 0

    async def exchange(self, address: str, node: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        self.count += 1
        if self.count % 2:
            raise PeerLost(f"{address} does not answer")
        return pb.Heartbeat(sender=pb.NodeFacts(id=THERE))


async def test_a_live_node_is_asked_again_at_once_however_often_it_missed_one_heartbeat() -> None:
    news, answers, enough = News(), list[NodeId](), asyncio.Event()

    def record_answer(node: NodeId, address: str, beat: pb.Heartbeat, seconds: float) -> None:
        answers.append(node)
        if len(answers) > QUICK_TRIES:
            enough.set()
        _ = asyncio.get_running_loop().call_soon(news.notify)  # the next heartbeat is due

    calls = Calls(
        own_address=lambda: "10.0.0.1:52416",
        heartbeat=pb.Heartbeat,
        record_answer=record_answer,
        record_refusal=lambda node, address: None,
        is_live=lambda node: True,
    )
    loops = Loops(EventLog(), LOCAL)
    exchanges = Exchanges(HERE, cast(Any, EverySecond()), loops, TIMING, news, calls)
    exchanges.dial(ADDRESS, THERE)
    try:
        async with asyncio.timeout(10):
            _ = await enough.wait()
    finally:
        await exchanges.close()
    assert {*answers} == {THERE}
