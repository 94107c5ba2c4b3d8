"""The exchange of heartbeats with each address, repeated; after failures less and less often."""

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
from ..machine.tasks import Loops, cancel
from ..machine.timing import Timing
from ..rpc.channels import checked
from ..rpc.control_client import ControlClient

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
    """An address that is dialled, and the result of the last heartbeats."""

    address: str
    node: NodeId | None
    backoff_s: float
    logged_code: str = ""
    """The error that was logged since the last answer."""
    failures: int = 0
    """Heartbeats in a row that were not answered."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The functions of the cluster that its exchanges call."""

    own_address: Callable[[], str]
    """host:port where this node listens; it is not dialled."""
    heartbeat: Callable[[], pb.Heartbeat]
    """This node's heartbeat as of now."""
    record_answer: Callable[[NodeId, str, pb.Heartbeat, float], None]
    """Node, address, its heartbeat, and the seconds since this node's was sent."""
    record_refusal: Callable[[NodeId, str], None]
    """The address at which that node answered before refuses connections."""
    is_live: Callable[[NodeId], bool]


@dataclass(eq=False, repr=False)
class Exchanges:
    """One loop for each address; runs on the node's event loop."""

    _self: NodeId
    _client: ControlClient
    _loops: Loops
    _timing: Timing
    _news: News
    """Sends the next heartbeats at once."""
    _calls: Calls

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def dial(self, address: str, node: NodeId | None = None) -> None:
        """Begins an exchange with the node that listens there, unless it has begun."""
        has_task = address in self._tasks or address == self._calls.own_address()
        if has_task or node == self._self:
            return
        exchange = partial(self._exchange, Dial(address, node, self._timing.heartbeat_s))
        self._tasks[address] = self._loops.keep(exchange, f"the exchange with {address}")

    async def close(self) -> None:
        await cancel(self._tasks.values())

    async def _exchange(self, dial: Dial) -> None:
        while True:
            started = time.monotonic()
            try:
                own = self._calls.heartbeat()
                beat = await self._client.exchange(dial.address, dial.node, own)
                beat = checked(beat, dial.address)
            except ExoNodeError as fault:
                log_failure(dial, fault)
                if isinstance(fault, PeerRefused) and dial.node is not None:
                    self._calls.record_refusal(dial.node, dial.address)
                await asyncio.sleep(self._until_next_try(dial))
                continue
            node = NodeId(beat.sender.id)
            if node == self._self:
                return  # one of this node's addresses, under another name
            dial.node, dial.backoff_s, dial.logged_code = node, self._timing.heartbeat_s, ""
            dial.failures = 0
            self._calls.record_answer(node, dial.address, beat, time.monotonic() - started)
            for address in beat.peers:
                self.dial(address)
            await self._news.wait(self._timing.heartbeat_s)

    def _until_next_try(self, dial: Dial) -> float:
        """Seconds; few where a live node did not answer, because its death delays the others."""
        timing = self._timing
        dial.failures += 1
        quick = dial.node is not None and dial.failures <= QUICK_TRIES
        if dial.node is not None and quick and self._calls.is_live(dial.node):
            return timing.tick_s
        limit_s = timing.max_retry_s if dial.node is None else timing.known_backoff_s
        pause, dial.backoff_s = dial.backoff_s, min(2 * dial.backoff_s, limit_s)
        return pause


def log_failure(dial: Dial, fault: ExoNodeError) -> None:
    """Logs each kind of error once: a node that is off for a night must not fill the log."""
    if dial.logged_code == fault.code:
        return
    dial.logged_code = fault.code
    if isinstance(fault, OtherCluster):  # as before every joining
        log.info("%s is not of this cluster: one of the two may ask to join", dial.address)
    elif fault.message.startswith(dial.address):
        log.warning("%s", fault.message)
    else:
        log.warning("%s: %s", dial.address, fault.message)
