"""Real clusters of one node each: two heads that meet, and a head that leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from simulated import Disk

from exo_node.node.cluster.cluster import Cluster
from exo_node.node.cluster.cluster_state import ClusterState
from exo_node.node.cluster.desired import Desired, DesiredPlacements
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
