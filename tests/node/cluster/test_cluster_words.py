"""Texts of events about the cluster, for people."""

import asyncio

from test_bounds import Node

from exo_node.node.machine.events import EventLog
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb


async def leaves(*, alone: bool) -> list[str]:
    node = Node(events := EventLog())
    _ = node.cluster_state.tick(0.0)
    if not alone:
        other = pb.NodeFacts(id="b", name="b", host="127.0.0.1", port=2)
        _ = node.answer_heartbeat(NodeId("b"), pb.Heartbeat(sender=other))
    node.cluster.leave()
    await node.cluster.close()
    return [event.text for event in events.entries() if event.kind == "election"]


def test_a_node_that_stops_alone_mentions_no_other_head() -> None:
    (alone,) = asyncio.run(leaves(alone=True))
    assert "no other node is here to lead" in alone
    (among,) = asyncio.run(leaves(alone=False))
    assert "electing another one" in among
