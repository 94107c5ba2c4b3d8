"""The times of measurements: at once for a new peer, seldom later, not during an answer."""

import asyncio
from collections.abc import Callable

from exo_node.node.links.prober import LinkProber, LinkTable
from exo_node.node.machine.timing import LAN
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

TIMING = LAN
B, C = NodeId("b"), NodeId("c")
ONE, TWO = "10.0.0.2:1", "10.0.1.2:1"
MEASURED = pb.LinkReport(
    echoes=[pb.Echoes(bytes=1024, count=5, min_s=1e-3, p50_s=2e-3)],
    bandwidth_out=1e8,
    bandwidth_in=2e8,
)


def idle(_: NodeId) -> bool:
    return False


def busy(_: NodeId) -> bool:
    return True


def measured_at(table: LinkTable, now: float, state: Callable[[NodeId], bool] = idle) -> list[str]:
    """The addresses that are due, each of which then counts as measured."""
    addresses: list[str] = []
    while (link := table.next_due(now, state)) is not None:
        link.tries, link.tried_at = link.tries + 1, now
        addresses.append(link.address)
    return addresses


def test_a_new_peer_is_measured_at_once_then_again_then_seldom() -> None:
    table = LinkTable(TIMING)
    table.update([(B, ONE), (B, TWO)], 1000.0)
    assert measured_at(table, 1000.0) == [ONE, TWO]
    assert measured_at(table, 1000.0 + TIMING.rescan_s - 1) == []
    assert measured_at(table, 1000.0 + TIMING.rescan_s + 1) == [ONE, TWO]
    assert measured_at(table, 1000.0 + TIMING.rescan_s + TIMING.refresh_s) == []
    assert measured_at(table, 1002.0 + TIMING.rescan_s + TIMING.refresh_s) == [ONE, TWO]


def test_a_new_address_of_a_known_peer_is_measured_alone() -> None:
    table = LinkTable(TIMING)
    table.update([(B, ONE)], 1000.0)
    assert measured_at(table, 1000.0) == [ONE]
    table.update([(B, ONE), (B, TWO)], 1001.0)
    assert measured_at(table, 1001.0) == [TWO]


def test_a_peer_that_comes_back_is_measured_at_once() -> None:
    table = LinkTable(TIMING)
    table.update([(B, ONE)], 1000.0)
    assert measured_at(table, 1000.0) == [ONE]
    table.update([], 1001.0)
    assert list(table.links) == []
    table.update([(B, ONE)], 1002.0)
    assert measured_at(table, 1002.0) == [ONE]


def test_a_link_under_an_answer_waits_but_not_for_ever() -> None:
    table = LinkTable(TIMING)
    table.update([(B, ONE), (C, TWO)], 1000.0)
    assert measured_at(table, 1000.0, lambda node: node == B) == [TWO]
    assert measured_at(table, 1000.0 + TIMING.overdue_s - 1, busy) == []
    assert measured_at(table, 1000.0 + TIMING.overdue_s + 1, busy) == [ONE], "never measured before"
    assert measured_at(table, 1000.0 + 10 * TIMING.refresh_s, busy) == []


class Network:
    """Links that answer, or are dead; the clock is the number of measurements."""

    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.calls: list[str] = []

    async def measure(self, address: str, _node: NodeId) -> pb.LinkReport:
        self.calls.append(address)
        await asyncio.sleep(0)
        if address in self.dead:
            raise PeerLost("no")
        return MEASURED

    def prober(self, *ends: tuple[NodeId, str], source: str | None = "10.0.0.1") -> LinkProber:
        return LinkProber(
            lambda: ends, idle, self.measure, lambda _: source, lambda: 1000.0, TIMING
        )


async def test_reports_name_both_addresses() -> None:
    prober = Network().prober((B, ONE))
    await prober.measure_due()
    [report] = prober.reports()
    assert (report.peer, report.from_address, report.to_address) == (B, "10.0.0.1", "10.0.0.2")
    assert (report.bandwidth_out, report.bandwidth_in) == (1e8, 2e8)
    assert report.echoes[0].p50_s == 2e-3


async def test_an_address_that_leads_nowhere_is_no_link_and_no_fault() -> None:
    network = Network(ONE)
    prober = network.prober((B, ONE), (B, TWO))
    await prober.measure_due()
    assert [report.to_address for report in prober.reports()] == ["10.0.1.2"]
    assert network.calls == [ONE, TWO]


async def test_a_dead_link_is_not_reported_any_more() -> None:
    network = Network()
    prober = network.prober((B, ONE))
    await prober.measure_due()
    assert prober.reports()
    network.dead = (ONE,)
    prober.expect_others()
    await prober.measure_due()
    assert prober.reports() == []


async def test_without_a_route_nothing_is_dialled() -> None:
    network = Network()
    prober = network.prober((B, ONE), source=None)
    await prober.measure_due()
    assert prober.reports() == []
    assert network.calls == []
