"""What a placement would have to bring to its nodes' disks, from where, and in what time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView, StageAssignment
from ...placement.ids import ModelId, NodeId
from ...shard.checkpoint.headers import Tensor
from ...shard.checkpoint.stage_files import files_of_stage

Layout = Callable[[ModelId], Sequence[Tensor] | None]
"""A model's tensors, where its headers are on this disk; blocks."""


@dataclass(frozen=True, slots=True)
class ToBring:
    """One stage's files; `source` None: no node has the model, and it is downloaded whole.

    `seconds` None: the link was not measured, or it is the hub's.
    """

    node: NodeId
    nbytes: int
    source: str | None
    seconds: float | None


def to_bring(
    card: ModelCard,
    stages: Sequence[StageAssignment],
    view: ClusterView,
    tensors: Sequence[Tensor] | None,
) -> list[ToBring]:
    """For the stages on nodes that lack the model; `tensors` None: its headers are not known here.

    What an earlier copy left on such a node is not known either: it is counted as missing.
    """
    return [
        _of_stage(card, stage, view, tensors, whole=len(stages) == 1)
        for stage in stages
        if not _has(card.id, view, stage.node)
    ]


def _has(model: ModelId, view: ClusterView, node: NodeId) -> bool:
    return model in view.node(node).models


def _of_stage(
    card: ModelCard,
    stage: StageAssignment,
    view: ClusterView,
    tensors: Sequence[Tensor] | None,
    *,
    whole: bool,
) -> ToBring:
    holders = [node for node in view.nodes if card.id in node.models]
    if not holders:
        return ToBring(stage.node, card.weight_bytes, None, None)
    rates = {node.id: _bandwidth(view, node.id, stage.node) for node in holders}
    best = min(holders, key=lambda node: (-rates[node.id], node.id))
    size = card.weight_bytes if whole else _stage_bytes(card, stage, tensors)
    rate = rates[best.id]
    return ToBring(stage.node, size, best.name, size / rate if rate else None)


def _bandwidth(view: ClusterView, a: NodeId, b: NodeId) -> float:
    return max((link.bandwidth for link in view.between(a, b)), default=0.0)


def _stage_bytes(card: ModelCard, stage: StageAssignment, tensors: Sequence[Tensor] | None) -> int:
    """Of the files that the stage reads, or by its share of the layers."""
    first, end, layers = stage.first_layer, stage.end_layer, card.num_layers
    if tensors is None:
        return card.weight_bytes * (end - first) // layers
    files = files_of_stage(tensors, first, end, layers, generator=first == 0)
    return sum(tensor.nbytes for tensor in tensors if tensor.file in files)
