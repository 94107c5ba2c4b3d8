"""Chooses nodes for warm spares of a placement's stages. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence

from .card import ModelCard
from .cluster import ClusterView, StageAssignment
from .cost import stage_bytes
from .ids import NodeId

Holder = tuple[NodeId, int]
"""A node and the number of the stage that it holds."""


def spare_node(
    card: ModelCard,
    view: ClusterView,
    stages: Sequence[StageAssignment],
    stage: int,
    holders: Collection[Holder],
    context: int,
    *,
    mtp: bool = False,
) -> NodeId | None:
    """The node for one more runner of `stage`; None where no live node has room.

    `holders` names every runner that the placement has already: a node never holds one stage twice.
    A node with no runner of this placement comes first, since its loss costs nothing else; then
    the one with the most memory left. Memory of the view is what other models leave.
    """

    def need(number: int) -> int:
        part = stages[number]
        generator = number == 0
        return stage_bytes(
            card, part.first_layer, part.end_layer, generator, context, mtp and generator
        )

    used: Counter[NodeId] = Counter()
    for node, number in holders:
        used[node] += need(number)
    busy = {part.node for part in stages}
    able = [
        (node.id in busy, used[node.id] - node.memory_bytes, node.id)
        for node in view.nodes
        if (node.id, stage) not in holders and used[node.id] + need(stage) <= node.memory_bytes
    ]
    return min(able)[2] if able else None
