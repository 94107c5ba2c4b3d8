"""The head's watch over stages: those that ended elsewhere, that have to move, that nobody uses.

Beginning and end of this node's time as the head are seen here too: placements that the last head
held are adopted, and left to the next one.
"""

import logging
import time
from collections.abc import Iterable

from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId, NodeId
from ...proto import peer_pb2 as pb
from ..cluster.cluster import Cluster
from ..cluster.desired import DesiredPlacements, desired_from_wire
from ..cluster.held import HeadReport, Held
from ..machine.events import EventLog
from ..machine.timing import PlacementTiming
from .claims import Claims
from .handover import Near, record_of
from .loaded_placement import expected_runners
from .placements import Placements
from .stages import Facts

log = logging.getLogger(__name__)


class StageReconciler:
    """Compares what heartbeats say of stages with what placements expect of them."""

    def __init__(
        self,
        cluster: Cluster,
        placements: Placements,
        claims: Claims,
        held: Held,
        desired: DesiredPlacements,
        facts: Facts,
        events: EventLog,
        near: Near,
        timing: PlacementTiming,
    ) -> None:
        self._cluster = cluster
        self._placements = placements
        self._claims = claims
        self._held = held
        self._desired = desired
        self._facts = facts
        self._events = events
        self._near = near
        self._timing = timing
        self._looked_at = float("-inf")
        self._superseded: set[str] = set()
        """Told already: the last heartbeats of a head that lost can come after it was heeded."""

    async def run(self) -> None:
        """Looks now and then, and when the head changes, until it is cancelled."""
        while True:
            await self.look()
            await self._cluster.heed(self._timing.watch_s)

    async def look(self) -> None:
        """During an election nothing is done: the old head may be the new one."""
        head = self._cluster.head
        if head == self._cluster.self_id:
            for told in self._held.take(self._cluster.leads).values():
                await self._take_over(told)
            self._claims.lead()
            paused, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
            if paused < self._timing.paused_s:
                await self._tend()
        elif head is not None:
            self._superseded.clear()
            self._claims.let_go()
            await self._placements.let_go()

    async def _take_over(self, told: HeadReport) -> None:
        """The next head goes on with what that one held. Of two placements of a model, as after a
        partition, this node's stays; the other's answers run to their end."""
        for held in told.placements:
            await self._adopt(held)
        for asked in told.desired:
            model, desired = ModelId(asked.model), desired_from_wire(asked)
            if not self._desired.asked(model):
                self._desired.note(model, desired)
            elif self._desired.of(model).options != desired.options:
                text = f"what was asked of {model} at a head that is none now does not hold here"
                self._tell_superseded(str(model), f"{text}; ask again if it should", model=model)

    async def _adopt(self, held: pb.HeldPlacement) -> None:
        model = ModelId(held.model)
        try:
            card, _ = await self._facts.card(model)
            record = record_of(held, card, self._near)
        except ExoNodeError as fault:
            log.warning("%s of %s cannot be gone on with: %s", held.placement, model, fault)
            return
        if record is None:
            log.warning("%s of %s cannot be gone on with: its stages", held.placement, model)
            return
        if not self._placements.adopt(record):
            text = f"{held.placement} of {model} was placed at a head that is none now, and this "
            text += "one has a placement of its own; answers on it run to their end"
            self._tell_superseded(held.placement, text, model=model, placement=held.placement)
            return
        for node in {endpoint.node for endpoint in record.endpoints} | {
            spare.node for spare in record.spares
        }:
            if not self._cluster.is_live(node):
                self._placements.lost_node(node, "its node went with the last head's time")

    def _tell_superseded(self, what: str, text: str, **facts: str) -> None:
        if what not in self._superseded:
            self._superseded.add(what)
            self._events.add("superseded", text, **facts)

    async def _tend(self) -> None:
        self._find_ended()
        self._placements.tend()
        for node in self._cluster.draining():
            self._placements.move_off(node)
        await self._placements.sweep(self._idle())

    def _idle(self) -> Iterable[tuple[NodeId, str, int]]:
        """Stages that no request uses and that no other head holds."""
        return (
            (member.id, stage.placement, stage.stage)
            for member in self._cluster.members()
            for stage in member.stages
            if not stage.live_requests
            and stage.status != "loading"
            and not self._held.names(stage.placement)
        )

    def _find_ended(self) -> None:
        """Stages on other nodes whose runners ended: their nodes' heartbeats stop naming them."""
        for node, expected in expected_runners(self._placements.records).items():
            for placement, stage in self._cluster.missing_stages(expected):
                why = "its runner ended on the other node"
                self._placements.lost_runner(node, placement, stage, why)
