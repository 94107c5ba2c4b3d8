"""How often an address is dialled again whose node did not answer."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, cast

from exo_node.node.cluster.exchanges import QUICK_TRIES, Calls, Exchanges, News
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

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
