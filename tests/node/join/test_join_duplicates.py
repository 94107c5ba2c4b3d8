"""Two processes with one node id: a copy is told from a restart, and the younger one gives up."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from exo_node.node.join.duplicates import DuplicateNodeDetector
from exo_node.placement.errors import DuplicateIdentity, PeerLost, Untrusted
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

FRESH_S = 10.0
OWN, OTHER = NodeId("a" * 20), NodeId("b" * 20)


class Lab:
    """A node, what answers where, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.uptime_ms = 5000
        self.answers: dict[str, int] = {}
        self.gave_up: list[str] = []
        self.twins = DuplicateNodeDetector(
            OWN, 1, lambda: self.uptime_ms, self._look, self._younger, FRESH_S, lambda: self.now
        )

    async def _look(self, address: str, node: NodeId) -> int | None:
        assert node == OTHER
        return self.answers.get(address)

    def _younger(self, fault: DuplicateIdentity) -> None:
        self.gave_up.append(fault.message)

    async def hear(self, life: int, port: int, *, leaving: bool = False) -> str:
        """What becomes of a heartbeat of OTHER: accepted, asked first, or refused."""
        sender = pb.NodeFacts(id=OTHER, host="10.0.0.2", port=port)
        try:
            self.twins.check(pb.Heartbeat(sender=sender, boot_id=life, leaving=leaving))
        except DuplicateIdentity:
            return "refused"
        except PeerLost:
            for _ in range(3):  # lets the look at the other address come to its end
                await asyncio.sleep(0)
            return "asked first"
        return "accepted"


def run(scenario: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scenario(Lab())

    asyncio.run(main())


def test_a_second_process_is_refused_while_the_first_answers() -> None:
    async def scenario(lab: Lab) -> None:
        lab.answers = {"10.0.0.2:1": 7}
        assert await lab.hear(7, 1) == "accepted"
        assert await lab.hear(8, 2) == "asked first"
        for _ in range(3):
            assert await lab.hear(8, 2) == "refused"
            assert await lab.hear(7, 1) == "accepted"
        # The first one ends: the copy is asked about anew, and is then the only one.
        lab.answers = {}
        lab.now += FRESH_S - 1
        assert await lab.hear(8, 2) == "refused"
        lab.now += 2
        assert await lab.hear(8, 2) == "accepted"

    run(scenario)


def test_a_restart_elsewhere_is_accepted_once_the_old_process_is_gone() -> None:
    async def scenario(lab: Lab) -> None:
        assert await lab.hear(7, 1) == "accepted"
        assert await lab.hear(8, 2) == "asked first"
        assert await lab.hear(8, 2) == "accepted"
        assert await lab.hear(8, 2) == "accepted"

    run(scenario)


def test_a_restart_at_the_same_address_is_accepted_at_once() -> None:
    async def scenario(lab: Lab) -> None:
        assert await lab.hear(7, 1) == "accepted"
        assert await lab.hear(8, 1) == "accepted"

    run(scenario)


def test_a_node_that_left_may_come_back_anywhere() -> None:
    async def scenario(lab: Lab) -> None:
        lab.answers = {"10.0.0.2:1": 7}
        assert await lab.hear(7, 1) == "accepted"
        assert await lab.hear(7, 1, leaving=True) == "accepted"
        assert await lab.hear(8, 2) == "accepted"

    run(scenario)


def test_of_two_with_this_nodes_id_the_younger_one_gives_up() -> None:
    async def scenario(lab: Lab) -> None:
        def meet(uptime_ms: int, life: int) -> None:
            sender = pb.NodeFacts(id=OWN, host="10.0.0.9", port=1, uptime_ms=uptime_ms)
            lab.twins.check(pb.Heartbeat(sender=sender, boot_id=life))

        meet(5000, 1)  # itself, under another of its addresses
        with pytest.raises(DuplicateIdentity, match=r"10\.0\.0\.9"):
            meet(10, 2)
        assert lab.gave_up == []
        with pytest.raises(Untrusted, match="gives up") as caught:
            meet(60_000, 2)
        assert not isinstance(caught.value, DuplicateIdentity), "the older one must not give up"
        assert len(lab.gave_up) == 1

    run(scenario)
