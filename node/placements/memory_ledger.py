"""What placements have been promised of each node's memory, from plan to unload; pure.

Nothing is kept beside the records: a promise begins with the plan in a record and ends when that is
unloaded, so that no failure can leave one behind. What nodes report lags behind: a stage that loads
holds nothing yet, and a context that nobody has filled is not in use.
"""

from collections.abc import Iterable, Mapping

from ...placement.cost import stage_bytes
from ...placement.ids import ModelId, NodeId
from .loaded_placement import LoadedPlacement

Promised = Mapping[NodeId, Mapping[ModelId, int]]
"""Bytes by node and model, headroom included."""


def promised(records: Iterable[LoadedPlacement]) -> Promised:
    """What the records' stages and spares may take, wherever they are or are being loaded."""
    found: dict[NodeId, dict[ModelId, int]] = {}
    for record in records:
        if record.unloaded:
            continue
        for node, stage in _holders(record):
            of_node = found.setdefault(node, {})
            of_node[record.card.id] = of_node.get(record.card.id, 0) + _bytes(record, stage)
    return found


def left(memory: int, promises: Mapping[ModelId, int], used: Mapping[ModelId, int]) -> int:
    """Bytes of a node that other models leave: each takes what it was promised, or more if it does.

    `promises` and `used` are of the other models, headroom included.
    """
    taken = sum(max(promises.get(model, 0), used.get(model, 0)) for model in {*promises, *used})
    return max(0, memory - taken)


def _holders(record: LoadedPlacement) -> list[tuple[NodeId, int]]:
    stages = [(stage.node, number) for number, stage in enumerate(record.stages)]
    return stages + [(s.node, s.stage) for s in record.spares if s.status != "failed"]


def _bytes(record: LoadedPlacement, number: int) -> int:
    stage = record.stages[number]
    mtp = record.specs[0].native_mtp if record.specs else not record.plan.mtp_off_reason
    context, card = record.plan.context_length, record.in_memory
    return stage_bytes(card, stage.first_layer, stage.end_layer, number == 0, context, mtp)
