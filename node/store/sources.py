"""The peers that a model can be copied from, and what a placement would copy in what time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView, StageAssignment
from ...placement.ids import ModelId, NodeId
from ..cluster.member import MemberFacts
from ..links.paths import fastest, link_paths


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A node that has a model; `bandwidth` in bytes a second, 0 where it was not measured."""

    node: NodeId
    name: str
    address: str
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferEstimate:
    """The model on its way to a node. `source` is None if none has it: it is downloaded.

    `seconds` is None if the link was not measured, or is the hub's.
    """

    node: NodeId
    nbytes: int
    source: str | None
    seconds: float | None


def sources_of(
    model: ModelId, here: NodeId, members: Sequence[MemberFacts], address: Callable[[NodeId], str]
) -> list[ModelSource]:
    """The nodes other than `here` that have the model, the one with the quickest link first.

    `address`: where this node reaches another one if no link was measured.
    """
    facts = [member.facts for member in members]
    paths, sources = link_paths(facts), list[ModelSource]()
    for each in facts:
        if each.id != here and model in each.models:
            node = NodeId(each.id)
            way = fastest(paths, here, node)
            where = f"{way.address_of(node)}:{each.port}" if way else address(node)
            sources.append(ModelSource(node, each.name, where, way.bandwidth if way else 0.0))
    return sorted(sources, key=lambda source: (-source.bandwidth, source.node))


def estimate_transfers(
    card: ModelCard, stages: Sequence[StageAssignment], view: ClusterView
) -> list[TransferEstimate]:
    """One for each stage on a node that lacks the model, as if nothing of it were there."""
    lacking = (s.node for s in stages if card.id not in view.node(s.node).models)
    return [_estimate(card, node, view) for node in lacking]


def _estimate(card: ModelCard, node: NodeId, view: ClusterView) -> TransferEstimate:
    rates = {n: _bandwidth(view, n.id, node) for n in view.nodes if card.id in n.models}
    if not rates:
        return TransferEstimate(node, card.weight_bytes, None, None)
    best = min(rates, key=lambda holder: (-rates[holder], holder.id))
    seconds = card.weight_bytes / rates[best] if rates[best] else None
    return TransferEstimate(node, card.weight_bytes, best.name, seconds)


def _bandwidth(view: ClusterView, a: NodeId, b: NodeId) -> float:
    return max((link.bandwidth for link in view.between(a, b)), default=0.0)
