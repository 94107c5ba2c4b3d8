"""Which nodes a model may be copied from, and where they are reached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...placement.ids import ModelId, NodeId
from ...proto import peer_pb2 as pb
from ..cluster.member import MemberFacts
from ..links.paths import fastest, link_paths, reached_at


@dataclass(frozen=True, slots=True)
class Source:
    """A node that has a model; `bandwidth` in bytes a second, 0 where it was not measured."""

    node: NodeId
    name: str
    address: str
    bandwidth: float = 0.0


def sources_of(
    model: ModelId, here: NodeId, members: Sequence[MemberFacts], address: Callable[[NodeId], str]
) -> list[Source]:
    """The nodes other than `here` that have the model, the one with the quickest link first.

    `address`: where this node reaches another one anyway.
    """
    facts = [member.facts for member in members]
    found = [
        _source(here, each, facts, address)
        for each in facts
        if each.id != here and model in each.models
    ]
    return sorted(found, key=lambda source: (-source.bandwidth, source.node))


def _source(
    here: NodeId,
    facts: pb.NodeFacts,
    members: Sequence[pb.NodeFacts],
    address: Callable[[NodeId], str],
) -> Source:
    node = NodeId(facts.id)
    way = fastest(link_paths(members), here, node)
    host = reached_at(members, here, node)
    where = address(node) if host is None else f"{host}:{facts.port}"
    return Source(node, facts.name, where, way.bandwidth if way else 0.0)
