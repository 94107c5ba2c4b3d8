"""Two heads that meet after a partition: the winner receives the loser's desired models."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from simulated import Disk

from exo_node.node.cluster.cluster import Cluster
from exo_node.node.cluster.cluster_state import ClusterState
from exo_node.node.cluster.desired import DesiredPlacement, DesiredPlacements
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
        self.id, self.way, events = NodeId(name), Way(), EventLog()
        self.desired = DesiredPlacements()
        self.desired.note(ModelId(f"model-{name}"), DesiredPlacement())
        client: Any = self.way
        self.cluster = Cluster(
            lambda: pb.NodeFacts(id=name, name=name, host="127.0.0.1", port=ord(name)),
            list,
            client,
            ClusterState(self.id, 1000, Disk(Term(term)), 0.0, LOCAL, wait_s=0.0),
            lambda _, __: None,
            "f",
            events,
            self.desired,
            Loops(events, LOCAL),
            LOCAL,
        )
        self.cluster.start()


@pytest.mark.parametrize("caller", ["the winner", "the loser"])
async def test_the_winner_receives_the_losers_desires_from_either_call(caller: str) -> None:
    loser, winner = Head("a", 1), Head("b", 7)
    try:
        assert loser.cluster.is_head and winner.cluster.is_head
        first, second = (winner, loser) if caller == "the winner" else (loser, winner)
        first.way.call = lambda beat: second.cluster.heard(first.id, beat)
        first.cluster.dial(f"127.0.0.1:{ord(second.id)}", second.id)
        async with asyncio.timeout(60):
            while loser.cluster.head != winner.id or winner.cluster.leads(loser.id):
                await asyncio.sleep(0.01)
        assert list(winner.desired.take(winner.cluster.leads)) == ["model-a"]
        assert winner.cluster.is_head
    finally:
        for each in (loser, winner):
            await each.cluster.close()
