"""Two processes with one node id: a copy is no restart, and the younger one gives up."""

import asyncio
from typing import Any, cast

import pytest

from exo_node.node.cluster.node_exit import EXIT_DUPLICATE, NodeExit
from exo_node.node.join.duplicates import WatchedClient
from exo_node.node.machine.timing import LOCAL
from exo_node.placement.errors import DuplicateIdentity, PeerLost, Untrusted
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

FRESH_S = LOCAL.silence_s
OWN, OTHER = NodeId("a" * 20), NodeId("b" * 20)


class Lab(WatchedClient):
    """A node's client, the processes that answer at addresses, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers: dict[str, int] = {}
        self.node_exit = NodeExit()
        super().__init__(
            cast(Any, None),
            OWN,
            1,
            lambda: pb.NodeFacts(uptime_ms=5000),
            self.node_exit,
            LOCAL,
            lambda: self.now,
        )

    async def boot_id_at(self, address: str, node: NodeId) -> int | None:
        assert node == OTHER
        return self.answers.get(address)

    async def beat(self, boot_id: int, port: int, *, leaving: bool = False) -> str:
        """The outcome of a heartbeat of OTHER: accepted, probed, or refused."""
        sender = pb.NodeFacts(id=OTHER, host="10.0.0.2", port=port)
        try:
            self.check(pb.Heartbeat(sender=sender, boot_id=boot_id, leaving=leaving))
        except DuplicateIdentity:
            return "refused"
        except PeerLost:
            for _ in range(3):  # lets the probe of the other address end
                await asyncio.sleep(0)
            return "probed"
        return "accepted"


async def test_a_second_process_is_refused_while_the_first_answers() -> None:
    lab = Lab()
    lab.answers = {"10.0.0.2:1": 7}
    assert await lab.beat(7, 1) == "accepted"
    assert await lab.beat(8, 2) == "probed"
    for _ in range(3):
        assert await lab.beat(8, 2) == "refused"
        assert await lab.beat(7, 1) == "accepted"
    # The first one ends: the next probe finds the copy alone.
    lab.answers = {}
    lab.now += FRESH_S - 1
    assert await lab.beat(8, 2) == "refused"
    lab.now += 2
    assert await lab.beat(8, 2) == "accepted"


async def test_a_restart_elsewhere_is_accepted_once_the_old_process_is_gone() -> None:
    lab = Lab()
    outcomes = [await lab.beat(*process) for process in ((7, 1), (8, 2), (8, 2), (8, 2))]
    assert outcomes == ["accepted", "probed", "accepted", "accepted"]


async def test_a_restart_at_the_same_address_is_accepted_at_once() -> None:
    lab = Lab()
    assert [await lab.beat(7, 1), await lab.beat(8, 1)] == ["accepted", "accepted"]


async def test_a_node_that_left_may_come_back_anywhere() -> None:
    lab = Lab()
    lab.answers = {"10.0.0.2:1": 7}
    assert await lab.beat(7, 1) == "accepted"
    assert await lab.beat(7, 1, leaving=True) == "accepted"
    assert await lab.beat(8, 2) == "accepted"


async def test_of_two_with_this_nodes_id_the_younger_one_gives_up() -> None:
    lab = Lab()

    def beat(uptime_ms: int, boot_id: int) -> None:
        sender = pb.NodeFacts(id=OWN, host="10.0.0.9", port=1, uptime_ms=uptime_ms)
        lab.check(pb.Heartbeat(sender=sender, boot_id=boot_id))

    beat(5000, 1)  # itself, under another of its addresses
    with pytest.raises(DuplicateIdentity, match=r"10\.0\.0\.9"):
        beat(10, 2)
    assert not lab.node_exit.decided
    with pytest.raises(Untrusted, match="gives up") as caught:
        beat(60_000, 2)
    assert not isinstance(caught.value, DuplicateIdentity), "the older one must not give up"
    assert lab.node_exit.outcome.result() == EXIT_DUPLICATE
