"""The head's watch over stages: those that ended elsewhere, that have to move, that nobody uses."""

import asyncio
import contextlib
import logging

from ..placement.errors import PlacementNotFound
from .cluster import Cluster
from .placements import Placements

log = logging.getLogger(__name__)

WATCH_S = 1.0


class StageWatch:
    """Compares what heartbeats say of stages with what placements expect of them."""

    def __init__(self, cluster: Cluster, placements: Placements) -> None:
        self._cluster = cluster
        self._placements = placements

    async def run(self) -> None:
        """Looks every WATCH_S until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._cluster.head in (None, self._cluster.self_id):
                await self._look()
            else:
                await self._hand_over()

    async def _look(self) -> None:
        self._find_ended()
        self._placements.tend()
        for node in self._cluster.draining():
            self._placements.move_off(node)
        await self._placements.sweep(
            (member.id, stage.placement, stage.stage)
            for member in self._cluster.members()
            for stage in member.stages
        )

    def _find_ended(self) -> None:
        """Stages on other nodes whose runners ended: their nodes' heartbeats stop naming them."""
        for node, expected in self._placements.expected().items():
            for placement, stage in self._cluster.missing_stages(expected):
                why = "its runner ended on the other node"
                self._placements.lost_runner(node, placement, stage, why)

    async def _hand_over(self) -> None:
        """Another node is the head and places models anew: what this one placed is in its way."""
        for record in self._placements.records:
            if record.status != "loading":
                log.info(
                    "unloading %s: node %s is the head now", record.card.id, self._cluster.head
                )
                # Gone already, where its answers took a while to end.
                with contextlib.suppress(PlacementNotFound):
                    await self._placements.remove(record.id)
