"""Two processes with one node id, because a data folder was copied: the younger one is refused.

A restarted node looks the same at first: another boot id under the same node id, perhaps at another
address. The difference is that the earlier process of a copied folder still answers, so the node
sends it a heartbeat before it decides.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DuplicateIdentity, ExoNodeError, PeerLost, Untrusted
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..cluster.node_exit import NodeExit
from ..machine.tasks import background, cancel
from ..machine.timing import Timing
from ..rpc.channels import Channels
from ..rpc.control_client import ControlClient
from ..rpc.control_server import PROTOCOL

log = logging.getLogger(__name__)
_START_TIME: Final = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Process:
    boot_id: int
    address: str
    last_heartbeat_at: float


class WatchedClient(ControlClient):
    """A control client that finds second processes with a node id, by the heartbeats of each."""

    def __init__(
        self,
        channels: Channels,
        node: NodeId,
        boot_id: int,
        facts: Callable[[], pb.NodeFacts],
        ending: NodeExit,
        timing: Timing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`facts` describes this node, whose process has that `boot_id`."""
        super().__init__(channels, timing)
        self._node = node
        self._boot_id = boot_id
        self._facts = facts
        self._ending = ending
        self._fresh_s = timing.silence_s
        self._clock = clock
        self._processes: dict[NodeId, _Process] = {}
        self._copies: dict[tuple[NodeId, int], float] = {}
        """When the refusal of each copy, by node and boot id, expires."""
        self._probing: set[NodeId] = set()
        self._last_heartbeat: pb.Heartbeat | None = None
        self._challenges: set[asyncio.Task[None]] = set()

    def check(self, beat: pb.Heartbeat) -> None:
        """Checks a heartbeat of an authenticated sender, sent here or a reply.

        Raises DuplicateIdentity for a copy, and PeerLost while the earlier process is being
        probed: the sender tries again.
        """
        node = NodeId(beat.sender.id)
        if node == self._node:
            self._check_own(beat)
            return
        address = f"{beat.sender.host}:{beat.sender.port}"
        now, earlier = self._clock(), self._processes.get(node)
        if beat.leaving:
            if earlier is not None and earlier.boot_id == beat.boot_id:
                del self._processes[node]
            return
        if (
            earlier is not None
            and earlier.boot_id != beat.boot_id
            and earlier.address != address
            and now - earlier.last_heartbeat_at < self._fresh_s
        ):
            self._refuse(node, beat.boot_id, earlier, now)
        self._processes[node] = _Process(beat.boot_id, address, now)

    async def exchange(self, address: str, node: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        self._last_heartbeat = beat
        try:
            reply = await super().exchange(address, node, beat)
        except DuplicateIdentity as fault:
            self._ending.give_up(fault)
            raise
        self.check(reply)
        if reply.sender.id != self._node:
            self._ending.note_accepted()
        return reply

    async def boot_id_at(self, address: str, node: NodeId) -> int | None:
        """The boot id of the process that answers there under that id, or None."""
        beat = self._last_heartbeat or self._greeting()
        try:
            return (await super().exchange(address, node, beat)).boot_id
        except ExoNodeError:
            return None  # a process that answers there is no node of this cluster

    def challenge(self, address: str) -> None:
        """Calls a process that announces this node's id: the younger of the two gives up."""
        task = background(self._challenge(address), "meeting a twin")
        self._challenges.add(task)
        task.add_done_callback(self._challenges.discard)

    async def close(self) -> None:
        await cancel(self._challenges)

    def _refuse(self, node: NodeId, boot_id: int, earlier: _Process, now: float) -> None:
        """Always raises: the newer process is a copy, or the earlier one is probed first."""
        if now < self._copies.get((node, boot_id), 0.0):
            raise DuplicateIdentity(
                f"node {node} runs already, at {earlier.address}: this is a second process with "
                "its data folder; remove node.key from the copy and start it again"
            )
        if node not in self._probing:
            self._probing.add(node)
            _ = background(self._probe_earlier(node, boot_id, earlier), f"a look for {node}")
        raise PeerLost(f"node {node} was at {earlier.address} until now; asking there first")

    async def _probe_earlier(self, node: NodeId, boot_id: int, earlier: _Process) -> None:
        try:
            answer = await self.boot_id_at(earlier.address, node)
        finally:
            self._probing.discard(node)
        if answer == earlier.boot_id:
            now = self._clock()
            self._copies = {pair: end for pair, end in self._copies.items() if end > now}
            self._copies[node, boot_id] = now + self._fresh_s
        elif self._processes.get(node) == earlier or answer is None:
            _ = self._processes.pop(node, None)

    def _check_own(self, beat: pb.Heartbeat) -> None:
        """Checks a sender of this node's id: this process at another address, or a twin."""
        if beat.boot_id == self._boot_id:
            return
        theirs, mine = beat.sender.uptime_ms, self._facts().uptime_ms
        where = f"{beat.sender.host}:{beat.sender.port}"
        if (theirs, beat.boot_id) > (mine, self._boot_id):
            fault = DuplicateIdentity(
                f"another process has this node's id and has run for longer, at {where}: if this "
                "data folder is a copy, remove node.key from it and start again"
            )
            self._ending.give_up(fault)
            raise Untrusted(f"node {self._node} at {where} is a copy and gives up")
        raise DuplicateIdentity(
            f"node {self._node} runs already: the process at {where} is a second one with its "
            "data folder; remove node.key from the copy and start it again"
        )

    async def _challenge(self, address: str) -> None:
        try:
            _ = await self.exchange(address, self._node, self._greeting())
        except PeerLost:
            log.debug("nobody answers at %s, which announces this node's id", address)
        except ExoNodeError as fault:
            log.warning("%s: %s", address, fault.message)

    def _greeting(self) -> pb.Heartbeat:
        return pb.Heartbeat(protocol=PROTOCOL, sender=self._facts(), boot_id=self._boot_id)


def uptime_ms() -> int:
    """Milliseconds since this process started."""
    return round(1000 * (time.monotonic() - _START_TIME))


def duplicate_message(node: NodeId) -> str:
    """The refusal of a second process with a node id, for a person."""
    return (
        f"another process with the node id {node} runs already; if the data folder of this one is "
        "a copy, remove node.key from it and start it again"
    )
