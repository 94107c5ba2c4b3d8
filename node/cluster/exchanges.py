"""The exchange of heartbeats with each known address: dialled, repeated, tried ever less often."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...placement.errors import ExoNodeError, OtherCluster, PeerRefused
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..machine.tasks import Loops
from ..machine.timing import Timing
from ..rpc.control_client import ControlClient
from .heartbeats import checked

log = logging.getLogger(__name__)

QUICK_TRIES = 6
"""Tries of a live node before its address is tried less and less often."""


class News:
    """Wakes all tasks that wait for news of the cluster. Its event is replaced after each use."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all tasks that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, within_s: float | None = None) -> None:
        """Returns at the next news, or after `within_s` seconds."""
        event = self._event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                _ = await event.wait()


@dataclass(slots=True)
class Dial:
    """An address that is worth dialling, and how that went."""

    address: str
    node: NodeId | None
    backoff_s: float
    complaint: str = ""
    failures: int = 0
    """Heartbeats in a row that were not answered."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The functions of the cluster that its exchanges call."""

    own_address: Callable[[], str]
    """host:port where this node listens; it is not dialled."""
    beat: Callable[[], pb.Heartbeat]
    """This node's heartbeat as of now."""
    answered: Callable[[NodeId, str, pb.Heartbeat, float], None]
    """A node's heartbeat came from that address, so many seconds after this node's was sent."""
    refused: Callable[[NodeId, str], None]
    """The address where that node was reached before refuses connections."""
    is_live: Callable[[NodeId], bool]


class Exchanges:
    """One loop for each address; runs on the node's event loop."""

    def __init__(
        self,
        self_id: NodeId,
        client: ControlClient,
        loops: Loops,
        timing: Timing,
        news: News,
        calls: Calls,
    ) -> None:
        """`news` sends the next heartbeats at once."""
        self._self = self_id
        self._client = client
        self._loops = loops
        self._timing = timing
        self._news = news
        self._calls = calls
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def dial(self, address: str, node: NodeId | None = None) -> None:
        """Begins an exchange with the node that listens there; known addresses are ignored."""
        dialled = address in self._tasks or address == self._calls.own_address()
        if dialled or node == self._self:
            return
        exchange = partial(self._exchange, Dial(address, node, self._timing.heartbeat_s))
        self._tasks[address] = self._loops.keep(exchange, f"the exchange with {address}")

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        _ = await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _exchange(self, dial: Dial) -> None:
        while True:
            started = time.monotonic()
            try:
                beat = await self._client.exchange(dial.address, dial.node, self._calls.beat())
                beat = checked(beat, dial.address)
            except ExoNodeError as fault:
                complain(dial, fault)
                if isinstance(fault, PeerRefused) and dial.node is not None:
                    self._calls.refused(dial.node, dial.address)
                await asyncio.sleep(self._until_next_try(dial))
                continue
            node = NodeId(beat.sender.id)
            if node == self._self:
                return  # one of our own addresses, under a name we did not know
            dial.node, dial.backoff_s, dial.complaint = node, self._timing.heartbeat_s, ""
            dial.failures = 0
            self._calls.answered(node, dial.address, beat, time.monotonic() - started)
            for address in beat.peers:
                self.dial(address)
            await self._news.wait(self._timing.heartbeat_s)

    def _until_next_try(self, dial: Dial) -> float:
        """Seconds. Soon where a live node did not answer: the others wait to know about it."""
        timing = self._timing
        dial.failures += 1
        quick = dial.node is not None and dial.failures <= QUICK_TRIES
        if dial.node is not None and quick and self._calls.is_live(dial.node):
            return timing.tick_s
        most = timing.max_retry_s if dial.node is None else timing.known_backoff_s
        pause, dial.backoff_s = dial.backoff_s, min(2 * dial.backoff_s, most)
        return pause


def complain(dial: Dial, fault: ExoNodeError) -> None:
    """Once for each kind of trouble: a node that is off for a night must not fill the log."""
    if dial.complaint == fault.code:
        return
    dial.complaint = fault.code
    if isinstance(fault, OtherCluster):  # as before every joining
        log.info("%s is not of this cluster: one of the two may ask to join", dial.address)
    elif fault.message.startswith(dial.address):
        log.warning("%s", fault.message)
    else:
        log.warning("%s: %s", dial.address, fault.message)
