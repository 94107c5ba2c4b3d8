"""Room for one more model: idle models with a limited stay go, others are loaded again in less.

A lengthened context, and float32 where 16 bits would do, are given while there is memory: what
nobody asked for is no reason to refuse another model.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView
from ...placement.cost import stage_bytes
from ...placement.dtype import dtypes_of
from ...placement.errors import ExoNodeError, InsufficientMemory
from ...placement.ids import ModelId, NodeId
from ...placement.options import DEFAULT_CONTEXT
from ...placement.plan import Placement, PlanOptions, plan
from ...placement.split_refusal import SplitRefusal
from .keeping import Keeping
from .loaded_placement import LoadedPlacement
from .memory_ledger import promised
from .stage_recovery import without
from .stages import Facts

log = logging.getLogger(__name__)

Work = Callable[[LoadedPlacement], Awaitable[object]]


class Room:
    """Plans a model, making room for it where that is needed."""

    def __init__(
        self,
        facts: Facts,
        keeping: Callable[[], Keeping],
        others: Callable[[ModelId], Iterable[LoadedPlacement]],
        unload: Work,
        shrink: Work,
    ) -> None:
        """`others`: the placements of other models than the one named, less those that load.

        `unload` and `shrink` end an idle placement, and load it again in less memory.
        """
        self._facts = facts
        self._keeping = keeping
        self._others = others
        self._unload = unload
        self._shrink = shrink
        self._shrinking = asyncio.Lock()

    async def plan(
        self,
        card: ModelCard,
        options: PlanOptions,
        refusal: SplitRefusal,
        lost: Collection[NodeId],
    ) -> Placement:
        """The plan. Raises InsufficientMemory where nothing that may give way is enough."""
        tried: set[ModelId] = set()
        bounds = options
        while True:
            if self._shrinking.locked() and not options.frugal:
                # What is loaded again is promised nothing for a moment.
                async with self._shrinking:
                    bounds = replace(options, frugal=True)
            view = without(self._facts.view(card.id), lost)
            try:
                return plan(card, view, bounds, pipeline_refusal=refusal)
            except InsufficientMemory:
                idle = self._keeping().in_the_way(self._others(card.id))
                if idle is not None:
                    log.info("%s is unloaded to make room for %s", idle.card.id, card.id)
                    await self._unload(idle)
                    continue
                if options.frugal:  # it makes room itself
                    raise
                generous = self._generous(card.id, view, tried)
                larger = _with_freed(view, generous)
                if not generous or not _fits(card, larger, options, refusal):
                    raise
            bounds = replace(options, frugal=True)  # memory is short: no more than it takes
            record = generous[0]
            tried.add(record.card.id)
            log.info("%s is loaded again in less memory, for %s", record.card.id, card.id)
            try:
                async with self._shrinking:
                    await self._shrink(record)
            except ExoNodeError as fault:  # its own load tells of it, and its room is free
                log.warning("%s could not be loaded again: %s", record.card.id, fault)

    def _generous(
        self, placing: ModelId, view: ClusterView, tried: Collection[ModelId]
    ) -> list[LoadedPlacement]:
        """Idle placements that can be smaller, the one that gives most first."""
        resting = (
            record
            for record in self._others(placing)
            if self._keeping().may_go(record)
            and not record.spares_wanted
            and record.card.id not in tried
        )
        sized = [(sum(freed(record, view).values()), record) for record in resting]
        return [record for size, record in sorted(sized, key=lambda each: -each[0]) if size > 0]


def freed(record: LoadedPlacement, view: ClusterView) -> dict[NodeId, int]:
    """Bytes by node that it was given and would not be given by a frugal plan for its nodes."""
    nodes = {node.id: node for node in view.nodes}
    if any(stage.node not in nodes for stage in record.stages):
        return {}
    asked = record.options.context is not None
    context = (
        record.plan.context_length if asked else min(record.plan.context_length, DEFAULT_CONTEXT)
    )
    *_, least = dtypes_of(record.card, [nodes[stage.node] for stage in record.stages])
    card = record.card.computed_in(least.name)
    mtp = record.specs[0].native_mtp
    given = {node: of_node.get(record.card.id, 0) for node, of_node in promised([record]).items()}
    for number, stage in enumerate(record.stages):
        given[stage.node] -= stage_bytes(
            card, stage.first_layer, stage.end_layer, number == 0, context, mtp
        )
    return given


def _with_freed(view: ClusterView, records: Sequence[LoadedPlacement]) -> ClusterView:
    """The view as it would be if all of them were smaller."""
    more: dict[NodeId, int] = {}
    for record in records:
        for node, size in freed(record, view).items():
            more[node] = more.get(node, 0) + size
    nodes = (
        replace(node, memory_bytes=node.memory_bytes + more.get(node.id, 0)) for node in view.nodes
    )
    return replace(view, nodes=tuple(nodes))


def _fits(card: ModelCard, view: ClusterView, options: PlanOptions, refusal: SplitRefusal) -> bool:
    try:
        _ = plan(card, view, options, pipeline_refusal=refusal)
    except InsufficientMemory:
        return False
    return True
