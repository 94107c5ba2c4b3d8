"""The measured paths between nodes, and the quickest of each pair. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...placement.cluster import LinkFacts
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb

TYPICAL_BYTES: Final = 64 << 10
"""The message size for comparisons: more than a token's hidden row, less than a chunk's rows."""
_LONGEST_S: Final = 60.0
_FASTEST: Final = 1e12


@dataclass(frozen=True, slots=True)
class LinkPath:
    """One pair of addresses between two nodes; the same in both directions."""

    a: NodeId
    b: NodeId
    a_address: str
    b_address: str
    round_trip_s: float
    """The median of the smallest message."""
    round_trip_min_s: float
    bandwidth: float
    """Bytes a second of the slower direction, or 0 if not measured."""
    age_s: int = 0
    """The age of the measurement."""

    @property
    def seconds(self) -> float:
        """The time of TYPICAL_BYTES in one direction, by which the quickest path is chosen."""
        rate = self.bandwidth or 1.0
        return self.round_trip_s / 2 + TYPICAL_BYTES / rate

    def address_of(self, node: NodeId) -> str:
        """The address at which the other node reaches `node`, one of the two."""
        return self.a_address if node == self.a else self.b_address


def link_paths(members: Sequence[pb.NodeFacts]) -> list[LinkPath]:
    """The paths of all usable reports of the members about each other, sorted by pair and time."""
    ids = {facts.id for facts in members}
    paths = [
        _path(NodeId(facts.id), report)
        for facts in members
        for report in facts.links
        if report.peer in ids and report.peer != facts.id and _usable(report)
    ]
    return sorted(paths, key=lambda path: (path.a, path.b, path.seconds, path.b_address))


def fastest(paths: Iterable[LinkPath], a: NodeId, b: NodeId) -> LinkPath | None:
    """The quickest path between two nodes, None where none was measured."""
    between = (path for path in paths if {path.a, path.b} == {a, b})
    return min(
        between, key=lambda path: (path.seconds, path.a_address, path.b_address), default=None
    )


def link_facts(members: Sequence[pb.NodeFacts]) -> tuple[LinkFacts, ...]:
    """The path of each pair of nodes that their stages take, for the planner."""
    paths = link_paths(members)
    chosen = {fastest(paths, path.a, path.b) for path in paths}
    return tuple(
        LinkFacts(path.a, path.b, path.round_trip_s, path.bandwidth)
        for path in sorted(filter(None, chosen), key=lambda path: (path.a, path.b))
    )


def nearest(
    members: Sequence[pb.NodeFacts], sender: NodeId, node: NodeId, ready: pb.LoadReady
) -> pb.LoadReady:
    """`ready` with the host and port at which `sender` reaches that runner of `node` quickest."""
    path = fastest(link_paths(members), sender, node)
    for address in ready.addresses:
        if path is not None and address.host == path.address_of(node):
            nearest_ready = pb.LoadReady()
            nearest_ready.CopyFrom(ready)
            nearest_ready.host, nearest_ready.port = address.host, address.port
            return nearest_ready
    return ready


def _path(sender: NodeId, report: pb.LinkReport) -> LinkPath:
    rates = [rate for rate in (report.bandwidth_out, report.bandwidth_in) if rate > 0]
    smallest = report.echoes[0]
    return LinkPath(
        a=sender,
        b=NodeId(report.peer),
        a_address=report.from_address,
        b_address=report.to_address,
        round_trip_s=smallest.p50_s,
        round_trip_min_s=smallest.min_s,
        bandwidth=min(rates, default=0.0),
        age_s=report.age_s,
    )


def _usable(report: pb.LinkReport) -> bool:
    """Whether another node's figures are times and rates: a NaN would win every comparison."""
    times = [second for echo in report.echoes for second in (echo.min_s, echo.p50_s)]
    rates = (report.bandwidth_out, report.bandwidth_in)
    return (
        bool(times)
        and all(math.isfinite(second) and 0 < second <= _LONGEST_S for second in times)
        and all(math.isfinite(rate) and 0 <= rate <= _FASTEST for rate in rates)
    )
