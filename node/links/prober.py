"""Measures this node's links: at join, at new addresses, then every few minutes while idle."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from ...placement.errors import ExoNodeError
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ..machine.timing import Timing

log = logging.getLogger(__name__)

LinkEnds = Collection[tuple[NodeId, str]]
"""Other live nodes, each with host:port of its control server; a node may have several."""


@dataclass(slots=True)
class ProbedLink:
    """One address of a peer, and its latest measurement."""

    peer: NodeId
    address: str
    added_at: float
    tried_at: float = 0.0
    tries: int = 0
    source: str = ""
    measurement: pb.LinkReport | None = None
    """Without addresses."""
    measured_at: float = 0.0

    def is_due(self, now: float, busy: Callable[[NodeId], bool], timing: Timing) -> bool:
        """Whether to measure now; `busy`: whether one of its ends generates an answer."""
        pause = timing.rescan_s if self.tries == 1 else timing.refresh_s
        if self.tries and now - self.tried_at < pause:
            return False
        age_s = now - self.added_at
        return not busy(self.peer) or (not self.tries and age_s > timing.overdue_s)

    def report(self, now: float) -> pb.LinkReport | None:
        if self.measurement is None:
            return None
        host, age_s = self.address.rpartition(":")[0], int(now - self.measured_at)
        report = pb.LinkReport(
            peer=self.peer, from_address=self.source, to_address=host, age_s=age_s
        )
        report.MergeFrom(self.measurement)
        return report


class LinkTable:
    """The links that this node measures, by peer and address; time is an argument."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._links: dict[tuple[NodeId, str], ProbedLink] = {}

    def update(self, ends: LinkEnds, now: float) -> None:
        """Adds the peers' new addresses and removes others, so a returning node is measured."""
        self._links = {key: link for key, link in self._links.items() if key in ends}
        for node, address in sorted({*ends} - self._links.keys()):
            self._links[node, address] = ProbedLink(node, address, now)

    def next_due(self, now: float, busy: Callable[[NodeId], bool]) -> ProbedLink | None:
        """The link that has waited longest of those that may be measured now."""
        due = [link for link in self._links.values() if link.is_due(now, busy, self._timing)]
        return min(due, key=lambda link: (link.tried_at, link.peer, link.address), default=None)

    @property
    def links(self) -> Sequence[ProbedLink]:
        return list(self._links.values())


@dataclass(eq=False, repr=False)
class LinkProber:
    """Keeps a `LinkTable` measured; one link at a time."""

    _peers: Callable[[], LinkEnds]
    """The ones that this node measures."""
    _busy: Callable[[NodeId], bool]
    """Whether this node or that peer generates."""
    _measure: Callable[[str, NodeId], Awaitable[pb.LinkReport]]
    _source: Callable[[str], str | None]
    _clock: Callable[[], float]
    _timing: Timing

    def __post_init__(self) -> None:
        self._table = LinkTable(self._timing)

    def reports(self) -> list[pb.LinkReport]:
        """The measurements of all links, for the heartbeat."""
        now = self._clock()
        reports = (link.report(now) for link in self._table.links)
        return [report for report in reports if report is not None]

    async def run(self) -> None:
        """Measures the links that are due, until it is cancelled."""
        while True:
            await self.measure_due()
            await asyncio.sleep(self._timing.watch_s)

    async def measure_due(self) -> None:
        self._table.update(self._peers(), self._clock())
        while (link := self._table.next_due(self._clock(), self._busy)) is not None:
            await self._try(link)

    def expect_others(self) -> None:
        """Makes every link due, as a new one."""
        for link in self._table.links:
            link.tries, link.added_at = 0, self._clock()

    async def _try(self, link: ProbedLink) -> None:
        link.tries, link.tried_at = link.tries + 1, self._clock()
        source = self._source(link.address.rpartition(":")[0])
        if source is None:
            return
        try:
            link.measurement = await self._measure(link.address, link.peer)
        except ExoNodeError as fault:
            # An address of another network, or of a bridge inside the peer.
            log.debug("no link to %s at %s: %s", link.peer, link.address, fault)
            link.measurement = None
            return
        link.source, link.measured_at = source, self._clock()
        smallest = link.measurement.echoes[0]
        log.debug(
            "link to %s at %s: %.2f ms, %.0f MB/s",
            link.peer,
            link.address,
            smallest.p50_s * 1e3,
            link.measurement.bandwidth_out / 1e6,
        )
