"""Two processes with one node id, because a data folder was copied: the younger one is refused.

A node that was restarted looks the same at first: another life under the same id, perhaps at
another address. The difference is that the earlier process still answers, so it is asked.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from ..placement.errors import DuplicateIdentity, PeerLost, Untrusted
from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .background import background

FRESH_S: Final = 10.0
"""A node that was not heard for so long is not asked: whoever comes under its id is it."""

Look = Callable[[str, NodeId], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class _Known:
    life: int
    address: str
    heard_at: float


class Twins:
    """What is known of the processes behind the ids."""

    def __init__(
        self,
        self_id: NodeId,
        life: int,
        uptime_ms: Callable[[], int],
        look: Look,
        is_younger: Callable[[DuplicateIdentity], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look` asks an address for the life of its process, None where nobody answers.

        `is_younger` hears that this process is the one to give up.
        """
        self._self_id = self_id
        self._life = life
        self._uptime_ms = uptime_ms
        self._look = look
        self._is_younger = is_younger
        self._clock = clock
        self._known: dict[NodeId, _Known] = {}
        self._refused: dict[tuple[NodeId, int], float] = {}
        self._looking: set[NodeId] = set()

    def check(self, beat: pb.Heartbeat) -> None:
        """Of a heartbeat whose sender is authenticated, in or out; raises DuplicateIdentity.

        Raises PeerLost while it is being found out: the sender tries again.
        """
        node = NodeId(beat.sender.id)
        if node == self._self_id:
            self._check_own(beat)
            return
        address = f"{beat.sender.host}:{beat.sender.port}"
        now, known = self._clock(), self._known.get(node)
        if beat.leaving:
            if known is not None and known.life == beat.life:
                del self._known[node]
            return
        other_process = known is not None and known.life != beat.life and known.address != address
        if known is not None and other_process and now - known.heard_at < FRESH_S:
            self._doubt(node, beat.life, known, now)
        self._known[node] = _Known(beat.life, address, now)

    def _doubt(self, node: NodeId, life: int, known: _Known, now: float) -> None:
        if now < self._refused.get((node, life), 0.0):
            raise DuplicateIdentity(
                f"node {node} runs already, at {known.address}: this is a second process with its "
                "data folder; remove node.key from the copy and start it again"
            )
        if node not in self._looking:
            self._looking.add(node)
            _ = background(self._find_out(node, life, known), f"a look for {node}")
        raise PeerLost(f"node {node} was at {known.address} until now; asking there first")

    async def _find_out(self, node: NodeId, life: int, known: _Known) -> None:
        try:
            answered = await self._look(known.address, node)
        finally:
            self._looking.discard(node)
        if answered == known.life:
            now = self._clock()
            self._refused = {pair: end for pair, end in self._refused.items() if end > now}
            self._refused[node, life] = now + FRESH_S
        elif self._known.get(node) == known or answered is None:
            _ = self._known.pop(node, None)

    def _check_own(self, beat: pb.Heartbeat) -> None:
        """This node's own id: its own process under another address, or a twin."""
        if beat.life == self._life:
            return
        theirs, mine = beat.sender.uptime_ms, self._uptime_ms()
        where = f"{beat.sender.host}:{beat.sender.port}"
        if (theirs, beat.life) > (mine, self._life):
            fault = DuplicateIdentity(
                f"another process has this node's id and has run for longer, at {where}: if this "
                "data folder is a copy, remove node.key from it and start again"
            )
            self._is_younger(fault)
            raise Untrusted(f"node {self._self_id} at {where} is a copy and gives up")
        raise DuplicateIdentity(
            f"node {self._self_id} runs already: the process at {where} is a second one with its "
            "data folder; remove node.key from the copy and start it again"
        )
