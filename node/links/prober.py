"""Measures this node's links: at join, when addresses change, then every few minutes while idle."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from ...placement.errors import ExoNodeError
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..machine.timing import LinkTiming
from ..rpc.link_rpc import Measured

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another live node; `addresses` are host:port of its control server."""

    id: NodeId
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Link:
    """One address of a peer and what was measured there."""

    peer: NodeId
    address: str
    known_at: float
    tried_at: float = 0.0
    tries: int = 0
    source: str = ""
    measured: Measured | None = None
    measured_at: float = 0.0

    def due(self, now: float, busy: Callable[[NodeId], bool], timing: LinkTiming) -> bool:
        """Whether to measure now; `busy`: an answer is being generated at an end of it."""
        pause = timing.second_look_s if self.tries == 1 else timing.refresh_s
        if self.tries and now - self.tried_at < pause:
            return False
        waited = now - self.known_at
        return not busy(self.peer) or (not self.tries and waited > timing.patience_s)

    def report(self, now: float) -> pb.LinkReport | None:
        if self.measured is None:
            return None
        return pb.LinkReport(
            peer=self.peer,
            from_address=self.source,
            to_address=self.address.rpartition(":")[0],
            echoes=self.measured.echoes,
            bandwidth_out=self.measured.bandwidth_out,
            bandwidth_in=self.measured.bandwidth_in,
            age_s=int(now - self.measured_at),
        )


class LinkTable:
    """The links that this node measures, by peer and address; time is an argument."""

    def __init__(self, timing: LinkTiming) -> None:
        self._timing = timing
        self._links: dict[tuple[NodeId, str], Link] = {}

    def update(self, peers: Iterable[Peer], now: float) -> None:
        """What is gone is forgotten, so that a node that comes back is measured at once."""
        wanted = {(peer.id, address) for peer in peers for address in peer.addresses}
        self._links = {key: link for key, link in self._links.items() if key in wanted}
        for node, address in sorted(wanted - self._links.keys()):
            self._links[node, address] = Link(node, address, now)

    def next_due(self, now: float, busy: Callable[[NodeId], bool]) -> Link | None:
        """The link that has waited longest of those that may be measured now."""
        due = [link for link in self._links.values() if link.due(now, busy, self._timing)]
        return min(due, key=lambda link: (link.tried_at, link.peer, link.address), default=None)

    @property
    def links(self) -> Sequence[Link]:
        return list(self._links.values())


class LinkProber:
    """Keeps a `LinkTable` measured; one link at a time."""

    def __init__(
        self,
        peers: Callable[[], list[Peer]],
        busy: Callable[[NodeId], bool],
        measure: Callable[[str, NodeId], Awaitable[Measured]],
        source: Callable[[str], str | None],
        clock: Callable[[], float],
        timing: LinkTiming,
    ) -> None:
        """`peers`: those this node measures; `busy`: whether it or that peer generates now."""
        self._peers = peers
        self._busy = busy
        self._measure = measure
        self._source = source
        self._clock = clock
        self._check_s = timing.check_s
        self._table = LinkTable(timing)
        self._turn = asyncio.Lock()

    def reports(self) -> list[pb.LinkReport]:
        """For the heartbeat."""
        now = self._clock()
        found = (link.report(now) for link in self._table.links)
        return [report for report in found if report is not None]

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._table.update(self._peers(), self._clock())
            while (link := self._table.next_due(self._clock(), self._busy)) is not None:
                await self._try(link)
            await asyncio.sleep(self._check_s)

    async def measure_all(self) -> list[pb.LinkReport]:
        """Every link anew, whatever its age."""
        self._table.update(self._peers(), self._clock())
        for link in self._table.links:
            await self._try(link)
        return self.reports()

    async def _try(self, link: Link) -> None:
        async with self._turn:
            link.tries, link.tried_at = link.tries + 1, self._clock()
            source = self._source(link.address.rpartition(":")[0])
            if source is None:
                return
            try:
                link.measured = await self._measure(link.address, link.peer)
            except ExoNodeError as fault:
                # An address of another network, or of a bridge inside the peer: not worth a line.
                log.debug("no link to %s at %s: %s", link.peer, link.address, fault)
                link.measured = None
                return
            link.source, link.measured_at = source, self._clock()
            fastest = link.measured.echoes[0]
            log.debug(
                "link to %s at %s: %.2f ms, %.0f MB/s",
                link.peer,
                link.address,
                fastest.p50_s * 1e3,
                link.measured.bandwidth_out / 1e6,
            )
