"""Two processes with one node id, because a data folder was copied: the younger one is refused.

A node that was restarted looks the same at first: another life under the same id, perhaps at
another address. The difference is that the earlier process still answers, so it is asked.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DuplicateIdentity, ExoNodeError, PeerLost, Untrusted
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.node_exit import NodeExit
from ..machine.tasks import background
from ..machine.timing import Timing
from ..rpc.channels import Channels
from ..rpc.control_client import ControlClient
from ..rpc.control_server import PROTOCOL

log = logging.getLogger(__name__)
_BORN: Final = time.monotonic()


Look = Callable[[str, NodeId], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class _Known:
    boot_id: int
    address: str
    heard_at: float


class DuplicateNodeDetector:
    """What is known of the processes behind the ids."""

    def __init__(
        self,
        self_id: NodeId,
        boot_id: int,
        uptime_ms: Callable[[], int],
        look: Look,
        is_younger: Callable[[DuplicateIdentity], None],
        fresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look` asks an address for the life of its process, None where nobody answers.

        `is_younger` hears that this process is the one to give up; see `JoinTiming` for `fresh_s`.
        """
        self._self_id = self_id
        self._life = boot_id
        self._uptime_ms = uptime_ms
        self._look = look
        self._is_younger = is_younger
        self._fresh_s = fresh_s
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
            if known is not None and known.boot_id == beat.boot_id:
                del self._known[node]
            return
        other_process = (
            known is not None and known.boot_id != beat.boot_id and known.address != address
        )
        if known is not None and other_process and now - known.heard_at < self._fresh_s:
            self._doubt(node, beat.boot_id, known, now)
        self._known[node] = _Known(beat.boot_id, address, now)

    def _doubt(self, node: NodeId, boot_id: int, known: _Known, now: float) -> None:
        if now < self._refused.get((node, boot_id), 0.0):
            raise DuplicateIdentity(
                f"node {node} runs already, at {known.address}: this is a second process with its "
                "data folder; remove node.key from the copy and start it again"
            )
        if node not in self._looking:
            self._looking.add(node)
            _ = background(self._find_out(node, boot_id, known), f"a look for {node}")
        raise PeerLost(f"node {node} was at {known.address} until now; asking there first")

    async def _find_out(self, node: NodeId, boot_id: int, known: _Known) -> None:
        try:
            answered = await self._look(known.address, node)
        finally:
            self._looking.discard(node)
        if answered == known.boot_id:
            now = self._clock()
            self._refused = {pair: end for pair, end in self._refused.items() if end > now}
            self._refused[node, boot_id] = now + self._fresh_s
        elif self._known.get(node) == known or answered is None:
            _ = self._known.pop(node, None)

    def _check_own(self, beat: pb.Heartbeat) -> None:
        """This node's own id: its own process under another address, or a twin."""
        if beat.boot_id == self._life:
            return
        theirs, mine = beat.sender.uptime_ms, self._uptime_ms()
        where = f"{beat.sender.host}:{beat.sender.port}"
        if (theirs, beat.boot_id) > (mine, self._life):
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


class WatchedClient(ControlClient):
    """Heartbeats go through here, so that a second process with a known id is noticed."""

    def __init__(
        self,
        channels: Channels,
        node: NodeId,
        boot_id: int,
        facts: Callable[[], pb.NodeFacts],
        ending: NodeExit,
        timing: Timing,
    ) -> None:
        """`facts`: of this node, whose process has that `boot_id`."""
        super().__init__(channels, timing.cluster)
        self._node = node
        self._life = boot_id
        self._facts = facts
        self._ending = ending
        self._duplicates = DuplicateNodeDetector(
            node, boot_id, uptime_ms, self.life_at, ending.give_up, timing.join.fresh_s
        )
        self._last: pb.Heartbeat | None = None
        self._meetings: set[asyncio.Task[None]] = set()

    def check(self, beat: pb.Heartbeat) -> None:
        """See `DuplicateNodeDetector.check`."""
        self._duplicates.check(beat)

    async def exchange(self, address: str, node: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        self._last = beat
        try:
            reply = await super().exchange(address, node, beat)
        except DuplicateIdentity as fault:
            self._ending.give_up(fault)
            raise
        self._duplicates.check(reply)
        if reply.sender.id != self._node:
            self._ending.was_accepted()
        return reply

    async def life_at(self, address: str, node: NodeId) -> int | None:
        """The life of the process that answers there under that id; None where nobody does."""
        try:
            return (await super().exchange(address, node, self._last or self._greeting())).boot_id
        except ExoNodeError:
            return None  # whatever it is, it is no node of this cluster that answers

    def meet(self, address: str) -> None:
        """A process announces this node's own id there: whichever is younger gives up."""
        task = background(self._meet(address), "meeting a twin")
        self._meetings.add(task)
        task.add_done_callback(self._meetings.discard)

    async def close(self) -> None:
        tasks = list(self._meetings)
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    async def _meet(self, address: str) -> None:
        try:
            _ = await self.exchange(address, self._node, self._greeting())
        except PeerLost:
            log.debug("nobody answers at %s, which announces this node's id", address)
        except ExoNodeError as fault:
            log.warning("%s: %s", address, fault.message)

    def _greeting(self) -> pb.Heartbeat:
        return pb.Heartbeat(protocol=PROTOCOL, sender=self._facts(), boot_id=self._life)


def uptime_ms() -> int:
    """Of this process."""
    return round(1000 * (time.monotonic() - _BORN))


def duplicate(node: NodeId) -> str:
    """What the second process with an id is told."""
    return (
        f"another process with the node id {node} runs already; if the data folder of this one is "
        "a copy, remove node.key from it and start it again"
    )
