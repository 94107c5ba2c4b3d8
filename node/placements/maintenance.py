"""What keeps placements well while they work: spares, moves off leaving nodes, stray stages."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence

from ...placement.cluster import ClusterView
from ...placement.errors import PeerLost
from ...placement.ids import NodeId, PlacementId
from ...placement.plan import Placement, seconds_now
from ..machine.tasks import background
from ..machine.timing import PlacementTiming
from .loaded_placement import LoadedPlacement
from .stage_recovery import StageRecovery
from .stages import Stages

log = logging.getLogger(__name__)


class Maintenance:
    """Works beside the answers; `close` ends what it began."""

    def __init__(
        self,
        stages: Stages,
        recovery: StageRecovery,
        left: Callable[[LoadedPlacement, int, NodeId], None],
        timing: PlacementTiming,
    ) -> None:
        """`left(record, stage, node)`: the stage has a spare now and may go off that node."""
        self._stages = stages
        self._recovery = recovery
        self._left = left
        self._timing = timing
        self._moving: set[tuple[PlacementId, NodeId]] = set()
        self._orphans: dict[tuple[NodeId, str, int], float] = {}
        # The loop holds tasks weakly; these must live to their end.
        self._tasks: set[asyncio.Task[None]] = set()

    def look_over(
        self, record: LoadedPlacement, silent: Callable[[LoadedPlacement, Sequence[int]], None]
    ) -> None:
        """Asks every stage of an adopted placement for a sign; `silent` hears of those without."""
        self._keep(self._look_over(record, silent))

    def fill(self, record: LoadedPlacement) -> None:
        """Ends what was replaced and loads the spares that are missing, after what is urgent."""
        if record.retired or record.spares_wanted:
            record.filled_at = time.monotonic()
            self._keep(self._fill(record))

    def tend(self, records: Iterable[LoadedPlacement]) -> None:
        """Tries again, now and then, for spares that are missing: what was in the way may go."""
        now = time.monotonic()
        for record in records:
            held = sum(spare.status != "failed" for spare in record.spares)
            short = len(record.stages) * record.spares_wanted - held
            due = now - record.filled_at > self._timing.refill_every_s
            if record.status == "ready" and due and short:
                self.fill(record)

    def move_off(self, records: Iterable[LoadedPlacement], node: NodeId) -> None:
        """The node is about to leave: its stages are loaded elsewhere, then changed over to.

        Answers go on as after a loss, without waiting for a load. Where no other node has room they
        end on the node that leaves, which waits for them.
        """
        for record in records:
            stages = [i for i, each in enumerate(record.endpoints) if each.node == node]
            if stages and record.status == "ready" and (record.id, node) not in self._moving:
                self._moving.add((record.id, node))
                self._keep(self._move(record, stages, node))

    async def sweep(
        self, records: Iterable[LoadedPlacement], held: Iterable[tuple[NodeId, str, int]]
    ) -> None:
        """Unloads stages, of (node, placement, stage) that live nodes hold, which nobody uses.

        They are left by a head that is gone, or by a node that was away when it was told.
        """
        ours = {(n, str(r.id), stage) for r in records for n, stage in r.holders()}
        now = time.monotonic()
        strange = [key for key in held if key not in ours]
        self._orphans = {key: self._orphans.get(key, now) for key in strange}
        over = [k for k, t in self._orphans.items() if now - t > self._timing.orphan_s]
        for node, placement, stage in over:
            log.info("unloading stage %d of %s on %s: nobody uses it", stage, placement, node)
            try:
                await self._stages.unload(node, PlacementId(placement), stage)
            except PeerLost as fault:
                log.info("%s", fault.message)

    async def close(self) -> None:
        """Of what it began; it may begin anew."""
        self._moving.clear()
        for task in self._tasks:
            task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look_over(
        self, record: LoadedPlacement, silent: Callable[[LoadedPlacement, Sequence[int]], None]
    ) -> None:
        lost: Sequence[int] = ()
        # Twice: an election is no quiet time, and a restoring interrupts the answers.
        for _ in range(2):
            lost = await self._recovery.lost_stages(record)
            if record.status != "ready" or not lost:
                return
        silent(record, lost)

    async def _fill(self, record: LoadedPlacement) -> None:
        await self._recovery.retire(record)
        await self._caught_up(record)
        if record.status == "ready":
            await self._recovery.refill(record)

    async def _caught_up(self, record: LoadedPlacement) -> None:
        """A load takes the cores that answers in progress need to catch up: they go first."""
        timing, begun = self._timing, time.monotonic()
        await asyncio.sleep(timing.answers_return_s)
        activity = record.activity
        if activity.requests:
            await asyncio.sleep(timing.refill_after_s)
        latest = begun + timing.refill_latest_s
        while activity.requests and activity.spoke_at < begun and time.monotonic() < latest:
            await asyncio.sleep(timing.refill_poll_s)

    async def _move(self, record: LoadedPlacement, stages: Sequence[int], node: NodeId) -> None:
        record.spares = [spare for spare in record.spares if spare.node != node]
        for stage in stages:
            if not await self._recovery.ensure_spare(record, stage):
                log.warning("stage %d of %s stays: %s", stage, record.id, record.spares_missing)
                return
        for stage in stages:
            self._left(record, stage, node)

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = background(work, "the upkeep of a placement")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


WORTHWHILE = 0.9
"""Of the present seconds a token: what is hardly faster is not worth a load."""


def may_settle(
    record: LoadedPlacement, timing: PlacementTiming, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Whether it is time to look for a place: for a better one after `settle_after_s` without an
    answer or a look, for one that failed after `max_pause_s`. The look is noted."""
    now = clock()
    quiet_s = now - max(record.moved_at, record.activity.stepped_at)
    if record.status == "failed":
        due = record.proven and quiet_s >= timing.max_pause_s
    else:
        at_rest = record.status == "ready" and not record.activity.requests
        due = bool(record.moved) and at_rest and quiet_s >= timing.settle_after_s
    if not due:
        return False
    record.moved_at = now
    return True


def settles(record: LoadedPlacement, planned: Placement, view: ClusterView) -> str:
    """Why the placement is better made anew as `planned`; empty where it is not."""
    if record.status == "failed":
        return f"it failed before: {record.load.error}"
    if not {stage.node for stage in record.stages} <= {node.id for node in view.nodes}:
        return ""  # about to be lost, or to come back
    used = len({stage.node for stage in record.stages})
    wanted = len({stage.node for stage in planned.stages})
    if used < record.options.min_nodes and used < wanted:
        return f"{wanted} nodes can hold it again, as was asked for"
    present = seconds_now(record.card, view, record.stages, record.plan.dtype)
    if planned.score > WORTHWHILE * present:
        return ""
    return f"{1000 * planned.score:.3g} ms a token are expected there, {1000 * present:.3g} here"
