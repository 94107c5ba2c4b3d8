"""The head's placements: planned, loaded over the nodes, connected, restored, replaced."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...placement.context import beside_spares
from ...placement.errors import ExoNodeError, LoadFailed, PlacementNotFound
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.plan import PlanOptions, plan
from ..cluster.desired import DesiredPlacement, DesiredPlacements
from ..machine.events import EventLog
from ..machine.log import apart
from ..machine.tasks import background
from ..machine.timing import PlacementTiming
from ..runners.runner_client import Endpoint
from .failover import Failover
from .keeping import Keeping
from .load_state import Status
from .loaded_placement import LoadedPlacement
from .loading import finish, load
from .maintenance import Maintenance, may_settle, settles
from .restart_backoff import TRIES, RestartBackoff
from .room import Room
from .stage_recovery import StageRecovery, without
from .stage_specs import StageSettings
from .stages import Facts, Stages

__all__ = [
    "Endpoint",
    "Facts",
    "LoadedPlacement",
    "Placements",
    "StageSettings",
    "Stages",
    "Status",
]

log = logging.getLogger(__name__)


class Placements:
    """One placement for each model at most. All methods run on the node's event loop."""

    def __init__(
        self,
        stages: Stages,
        facts: Facts,
        timing: PlacementTiming,
        events: EventLog | None = None,
        desired: DesiredPlacements | None = None,
        changed: Callable[[], None] = lambda: None,
        keep_alive_s: float = math.inf,
    ) -> None:
        """`events` hears of what a person should know; `desired` of what a person asked for.

        `keep_alive_s`: how long a model stays loaded without use.
        `changed` is called when there is something new for the other nodes.
        """
        self._stages = stages
        self._facts = facts
        self._timing = timing
        self._events = EventLog() if events is None else events
        self._recovery = StageRecovery(stages, facts)
        self._failures = RestartBackoff(timing)
        self._maintenance = Maintenance(stages, self._recovery, self._left, timing)
        self._failover = Failover(
            self._recovery, facts, self._failures, self._events, changed, self._maintenance.fill
        )
        self._desired = DesiredPlacements() if desired is None else desired
        self._records: dict[ModelId, LoadedPlacement] = {}
        self._loading: dict[ModelId, asyncio.Task[LoadedPlacement]] = {}
        self._changed = changed
        self.keeping = Keeping(keep_alive_s, timing.just_given_s)
        self._room = Room(
            facts, lambda: self.keeping, self._others, self._unload_idle, self._shrink
        )
        self._unloading: set[asyncio.Task[None]] = set()

    @property
    def records(self) -> list[LoadedPlacement]:
        return list(self._records.values())

    async def ensure(self, model: ModelId) -> LoadedPlacement:
        """The model's placement, loaded on first use; requests that come meanwhile share the load.

        Raises what planning and loading raise.
        """
        while True:
            if (loading := self._loading.get(model)) is not None:
                if (placed := await self._outcome(model, loading)) is not None:
                    return placed
                continue
            record = self._records.get(model)
            if record is not None and record.restoring is not None:
                await asyncio.shield(record.restoring)
                if record.status == "ready":
                    return record
            elif record is not None and record.status == "ready" and not self._outdated(record):
                self.keeping.touch(record)
                return record
            elif record is None or not (wait_s := self._remaining_s(record)):
                _ = self._start(model, self._wish(model))
            else:
                await asyncio.sleep(min(wait_s, self._timing.watch_s))

    async def place(self, model: ModelId, options: PlanOptions, spares: int = 0) -> LoadedPlacement:
        """Plans and loads, replacing the model's placement after its requests have drained.

        `spares` of each stage are loaded afterwards, where live nodes have room.
        """
        self._failures.forget(model)
        while (loading := self._loading.get(model)) is not None:
            _ = await asyncio.wait([loading])
        desired = DesiredPlacement(options, spares)
        placed = await asyncio.shield(self._start(model, desired))
        self._desired.note(model, desired)
        return placed

    async def remove(self, placement: PlacementId) -> None:
        """Unloads once its requests have drained. Raises PlacementNotFound."""
        for model, record in self._records.items():
            if record.id == placement:
                self._failures.forget(model)
                self._desired.forget(model)
                await self._drain(model)
                return
        raise PlacementNotFound(f"no placement {placement} is here", param="id")

    def release(self, model: ModelId) -> None:
        """Unloads it as soon as it is idle; nothing where it is not loaded."""
        if (record := self.of(model)) is not None:
            self.keeping.release(record)

    def of(self, model: ModelId) -> LoadedPlacement | None:
        return self._records.get(model)

    def find(self, placement: PlacementId) -> LoadedPlacement | None:
        return next((record for record in self.records if record.id == placement), None)

    def broke(
        self, placement: PlacementId, connections: int, why: str, gone: Iterable[int] = ()
    ) -> None:
        """An attempt failed that began when the stages had been connected so many times.

        `gone`: stages that did not answer it.
        """
        if (record := self.find(placement)) is not None:
            self._failover.broke(record, connections, why, gone)

    def adopt(self, record: LoadedPlacement) -> bool:
        """Goes on with what another head held, unless the model has another placement here."""
        model = record.card.id
        if (own := self._records.get(model)) is not None or model in self._loading:
            return own is not None and own.id == record.id
        self._records[model] = record
        record.see(self._facts.view(model))
        record.activity.stepped_at = time.monotonic()
        text = f"goes on with {record.id} of {model}, which the last head placed"
        self._events.add("adopted", text, model=model, placement=record.id)
        self._maintenance.look_over(record, self._silent)
        return True

    async def let_go(self) -> None:
        """Another node is the head and goes on with them: nothing is unloaded."""
        records, self._records = self.records, {}
        for record in records:
            log.info("%s of %s is another head's now", record.id, record.card.id)
        await self._cancel(records)

    def lost(self, placement: PlacementId, stage: int | None, why: str) -> None:
        """A stage is gone, or (None) some stage may be: the placement is restored."""
        if (record := self.find(placement)) is not None:
            self._failover.lost(record, stage, why)

    def lost_runner(self, node: NodeId, placement: str, stage: int, why: str) -> None:
        """The runner of a stage on that node ended, be it the stage's own or a spare of it."""
        if (record := self.find(PlacementId(placement))) is not None:
            self._failover.lost_on(record, node, why, stage)

    def lost_node(self, node: NodeId, why: str) -> None:
        """As `lost`, for every stage and spare on that node."""
        for record in self.records:
            self._failover.lost_on(record, node, why)

    def tend(self) -> None:
        """Tries again, now and then, for spares that are missing, and for a better place."""
        self._maintenance.tend(self.records)
        for record in self.keeping.due(self.records):
            task = background(self._unload_idle(record), "the unloading of an idle model")
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)
        for record in self.records:
            if may_settle(record, self._timing):
                self._settle(record)

    def move_off(self, node: NodeId) -> None:
        """The node is about to leave: its stages go to others first, if those have room."""
        self._maintenance.move_off(self.records, node)

    def succeeded(self, record: LoadedPlacement) -> None:
        """It answers well: earlier failures of the model no longer count."""
        self._failures.forget(record.card.id)

    async def sweep(self, held: Iterable[tuple[NodeId, str, int]]) -> None:
        """Unloads stages, of (node, placement, stage) that live nodes hold, which nobody uses."""
        await self._maintenance.sweep(self.records, held)

    async def close(self) -> None:
        """Leaves what other nodes hold to the next head."""
        for task in self._unloading:
            task.cancel()
        _ = await asyncio.gather(*self._unloading, return_exceptions=True)
        await self._cancel(self.records)

    async def _cancel(self, records: Sequence[LoadedPlacement]) -> None:
        restoring = [r.restoring for r in records if r.restoring is not None]
        tasks: list[asyncio.Task[Any]] = [*self._loading.values(), *restoring]
        for task in tasks:
            task.cancel()
        _ = await asyncio.gather(*tasks, self._maintenance.close(), return_exceptions=True)

    def _start(
        self, model: ModelId, desired: DesiredPlacement, *, frugal: bool = False
    ) -> "asyncio.Task[LoadedPlacement]":
        work = self._replace(model, desired, frugal=frugal)
        task = asyncio.create_task(work, context=apart())
        self._loading[model] = task
        task.add_done_callback(lambda done: self._loaded(model, done))
        return task

    def _loaded(self, model: ModelId, done: "asyncio.Task[LoadedPlacement]") -> None:
        if self._loading.get(model) is done:
            del self._loading[model]
        if not done.cancelled() and (fault := done.exception()) is not None:
            self._events.add("load_failed", f"{model} could not be placed: {fault}", model=model)

    async def _replace(
        self,
        model: ModelId,
        desired: DesiredPlacement,
        lost: frozenset[NodeId] = frozenset(),
        *,
        frugal: bool = False,
    ) -> LoadedPlacement:
        """`lost`: nodes that count as alive and were found to be gone. `frugal`: in no more
        memory than it takes."""
        card, fingerprint = await self._facts.card(model)
        view = without(self._facts.view(model), lost)
        refusal = self._facts.split_refusal(model)
        options = desired.within(view)
        bounds = replace(beside_spares(card, options, desired.spares), frugal=frugal)
        planned = await self._room.plan(card, bounds, refusal, lost)
        proven = (before := self._records.get(model)) is not None and before.proven
        if before is not None:
            await self._drain(model)
            # Others may have been placed meanwhile.
            view = without(self._facts.view(model), lost)
            planned = plan(card, view, bounds, pipeline_refusal=refusal)
        placement = PlacementId(f"p-{secrets.token_hex(4)}")
        record = LoadedPlacement(
            placement, card, planned, desired.options, spares_wanted=desired.spares, proven=proven
        )
        record.see(view)
        if options != desired.options:
            record.note_move("fewer nodes are here than were asked for")
        self._records[model] = record
        dead: set[NodeId] = set()
        started = time.monotonic()
        try:
            lease_s = self._timing.lease_s
            await load(record, self._stages, self._facts, fingerprint, lease_s, dead)
            await self._recovery.connect(record)
            took = finish(record, started)
        except ExoNodeError as fault:
            record.load.fail(fault.message)
            await self._recovery.unload(record)
            if dead:
                log.warning("%s is planned anew: %s", model, fault)
                return await self._replace(model, desired, lost | dead, frugal=frugal)
            self._failures.note(model)
            if self._facts.split_refusal(model) != refusal:
                log.warning("%s is planned anew: %s", model, fault)
                _ = self._records.pop(model, None)
                return await self._replace(model, desired, frugal=frugal)
            raise
        except asyncio.CancelledError:
            await self._recovery.unload(record)
            raise
        self._changed()
        text = f"placed {model} as {record.id} in {took:.1f} s: {record.plan.reason}"
        seconds = round(took, 3)
        self._events.add("placed", text, model=model, placement=record.id, seconds=seconds)
        self._maintenance.fill(record)
        return record

    def _outdated(self, record: LoadedPlacement) -> bool:
        """The head was left out because of a switch that is on now: load again, with it."""
        mtp = record.card.native_mtp
        if mtp is None or record.plan.mtp_off_reason or record.head_asked_for:
            return False
        return self._facts.mtp_switch(record.generator.node).enabled

    def _settle(self, record: LoadedPlacement) -> None:
        model = record.card.id
        desired = record.desired
        view, refusal = self._facts.view(model), self._facts.split_refusal(model)
        try:
            planned = plan(record.card, view, desired.within(view), pipeline_refusal=refusal)
            why = settles(record, planned, view)
        except ExoNodeError as fault:
            # What runs goes on, and is looked at again later.
            log.info("no better place for %s: %s", record.id, fault)
            return
        if why and model not in self._loading:
            text = f"{record.id} of {model} is placed anew: {why}"
            self._events.add("replanned", text, model=model, placement=record.id)
            _ = self._start(model, desired)

    def _silent(self, record: LoadedPlacement, stages: Sequence[int]) -> None:
        if self.find(record.id) is record:
            self._failover.silent(record, stages)

    def _left(self, record: LoadedPlacement, stage: int, node: NodeId) -> None:
        if self.find(record.id) is record:
            self._failover.lost(record, stage, f"node {node} is leaving", planned=True)

    def _wish(self, model: ModelId) -> DesiredPlacement:
        record = self._records.get(model)
        return self._desired.of(model) if record is None else record.desired

    def _others(self, model: ModelId) -> list[LoadedPlacement]:
        """Those that may give way to it."""
        kept = {model, *self._loading}
        return [record for record in self.records if record.card.id not in kept]

    async def _shrink(self, record: LoadedPlacement) -> None:
        model = record.card.id
        text = f"{record.id} of {model} is loaded again in less memory, to make room for another"
        self._events.add("replanned", text, model=model, placement=record.id)
        _ = await asyncio.shield(self._start(model, record.desired, frugal=True))

    async def _unload_idle(self, record: LoadedPlacement) -> None:
        """Less than `remove`: how it was asked for is kept, for when it is loaded again."""
        model = record.card.id
        used = self._records.get(model) is not record or record.activity.requests
        if not used and model not in self._loading:
            await self._drain(model)

    async def _drain(self, model: ModelId) -> None:
        record = self._records[model]
        within_s = self._timing.drain_s
        try:
            async with asyncio.timeout(within_s):
                _ = await record.activity.idle.wait()
        except TimeoutError:
            log.warning("placement %s did not drain in %.0f s", record.id, within_s)
        if self._records.get(model) is record:
            del self._records[model]
            self._changed()
        if (restoring := record.restoring) is not None:  # such as in a pause between two losses
            _ = restoring.cancel()
            _ = await asyncio.wait([restoring])
        await self._recovery.unload(record)
        text = f"unloaded {record.id} of {model}"
        self._events.add("unloaded", text, model=model, placement=record.id)

    async def _outcome(
        self, model: ModelId, loading: "asyncio.Task[LoadedPlacement]"
    ) -> LoadedPlacement | None:
        """The load's; None: it is to be tried again, since the model was ready before."""
        try:
            # A client that goes away must not stop the load that others wait for.
            return await asyncio.shield(loading)
        except LoadFailed:
            record = self._records.get(model)
            if record is None or not record.proven or self._failures.count(model) >= TRIES:
                raise
            await asyncio.sleep(0)  # the load's end is noted then
            return None

    def _remaining_s(self, record: LoadedPlacement) -> float:
        """Seconds until a placement that failed may be loaded again.

        Raises LoadFailed for one that was never ready: nothing says that it would be then.
        """
        wait_s = self._failures.remaining_s(record.card.id)
        if wait_s and not record.proven:
            raise LoadFailed(
                f"{record.card.id} could not be loaded {self._failures.count(record.card.id)} "
                f"times in a row: {record.load.error}. A request in {math.ceil(wait_s)} s tries it "
                "again, `POST /v1/placements` at once",
                param="model",
            )
        return wait_s
