"""The measured ways between nodes, and the quickest of each pair; pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...placement.cluster import LinkFacts
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb

TYPICAL_BYTES: Final = 64 << 10
"""What ways are compared by: more than a token's hidden row, less than a prefill chunk's."""
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
    """Bytes a second of the slower direction; 0: not measured."""
    age_s: int = 0
    """Of the measurement."""

    @property
    def seconds(self) -> float:
        """One way for TYPICAL_BYTES: what the quickest is chosen by."""
        rate = self.bandwidth or 1.0
        return self.round_trip_s / 2 + TYPICAL_BYTES / rate

    def address_of(self, node: NodeId) -> str:
        """Where the other node reaches `node`, one of the two."""
        return self.a_address if node == self.a else self.b_address


def ways(members: Sequence[pb.NodeFacts]) -> list[LinkPath]:
    """Every usable report of the members about each other, by the names of its ends."""
    ids = {facts.id for facts in members}
    found = [
        _way(NodeId(facts.id), report)
        for facts in members
        for report in facts.links
        if report.peer in ids and report.peer != facts.id and _usable(report)
    ]
    return sorted(found, key=lambda way: (way.a, way.b, way.seconds, way.b_address))


def fastest(known: Iterable[LinkPath], a: NodeId, b: NodeId) -> LinkPath | None:
    """The quickest way between two nodes, None where none was measured."""
    between = (way for way in known if {way.a, way.b} == {a, b})
    return min(between, key=lambda way: (way.seconds, way.a_address, way.b_address), default=None)


def link_facts(members: Sequence[pb.NodeFacts]) -> tuple[LinkFacts, ...]:
    """For each pair of nodes the way that their stages take: the planner counts on no other."""
    known = ways(members)
    chosen = {fastest(known, way.a, way.b) for way in known}
    return tuple(
        LinkFacts(way.a, way.b, way.round_trip_s, way.bandwidth)
        for way in sorted(
            (way for way in chosen if way is not None), key=lambda way: (way.a, way.b)
        )
    )


def reached_at(members: Sequence[pb.NodeFacts], sender: NodeId, node: NodeId) -> str | None:
    """The address that `sender` reaches `node` at quickest; None: nothing better is known."""
    way = fastest(ways(members), sender, node)
    return None if way is None else way.address_of(node)


def nearest(
    members: Sequence[pb.NodeFacts], sender: NodeId, node: NodeId, ready: pb.LoadReady
) -> pb.LoadReady:
    """`ready` with the host and port that `sender` reaches that runner of `node` at quickest."""
    wanted = reached_at(members, sender, node)
    for address in ready.addresses:
        if address.host == wanted:
            moved = pb.LoadReady()
            moved.CopyFrom(ready)
            moved.host, moved.port = address.host, address.port
            return moved
    return ready


def _way(sender: NodeId, report: pb.LinkReport) -> LinkPath:
    measured = [rate for rate in (report.bandwidth_out, report.bandwidth_in) if rate > 0]
    smallest = report.echoes[0]
    return LinkPath(
        a=sender,
        b=NodeId(report.peer),
        a_address=report.from_address,
        b_address=report.to_address,
        round_trip_s=smallest.p50_s,
        round_trip_min_s=smallest.min_s,
        bandwidth=min(measured, default=0.0),
        age_s=report.age_s,
    )


def _usable(report: pb.LinkReport) -> bool:
    """Another node's figures: a NaN or a negative one would win every comparison."""
    times = [second for echo in report.echoes for second in (echo.min_s, echo.p50_s)]
    rates = (report.bandwidth_out, report.bandwidth_in)
    return (
        bool(times)
        and all(math.isfinite(second) and 0 < second <= _LONGEST_S for second in times)
        and all(math.isfinite(rate) and 0 <= rate <= _FASTEST for rate in rates)
    )
