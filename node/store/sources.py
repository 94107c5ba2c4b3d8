"""The peers that a model can be copied from, and what a placement would copy in what time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView, StageAssignment
from ...placement.ids import ModelId, NodeId
from ...shard.checkpoint.headers import Tensor
from ...shard.checkpoint.stage_files import files_of_stage
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
    """One stage's files. `source` is None if no node has the model: it is downloaded whole.

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
    card: ModelCard,
    stages: Sequence[StageAssignment],
    view: ClusterView,
    tensors: Sequence[Tensor] | None,
) -> list[TransferEstimate]:
    """One for each stage on a node that lacks the model. `tensors` is its layout, if it is here.

    The files that an earlier copy left on such a node are counted as missing.
    """
    return [
        _estimate(card, stage, view, tensors, whole=len(stages) == 1)
        for stage in stages
        if card.id not in view.node(stage.node).models
    ]


def _estimate(
    card: ModelCard,
    stage: StageAssignment,
    view: ClusterView,
    tensors: Sequence[Tensor] | None,
    *,
    whole: bool,
) -> TransferEstimate:
    holders = [node for node in view.nodes if card.id in node.models]
    if not holders:
        return TransferEstimate(stage.node, card.weight_bytes, None, None)
    rates = {node.id: _bandwidth(view, node.id, stage.node) for node in holders}
    best = min(holders, key=lambda node: (-rates[node.id], node.id))
    size = card.weight_bytes if whole else _stage_bytes(card, stage, tensors)
    rate = rates[best.id]
    return TransferEstimate(stage.node, size, best.name, size / rate if rate else None)


def _bandwidth(view: ClusterView, a: NodeId, b: NodeId) -> float:
    return max((link.bandwidth for link in view.between(a, b)), default=0.0)


def _stage_bytes(card: ModelCard, stage: StageAssignment, tensors: Sequence[Tensor] | None) -> int:
    """The bytes of the files that the stage reads; without a layout, its share of the layers."""
    first, end, layers = stage.first_layer, stage.end_layer, card.num_layers
    if tensors is None:
        return card.weight_bytes * (end - first) // layers
    files = files_of_stage(tensors, first, end, layers, generator=first == 0)
    return sum(tensor.nbytes for tensor in tensors if tensor.file in files)
