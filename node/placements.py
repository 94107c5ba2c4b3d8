"""The head's placements: planned, loaded over the nodes, connected, watched, restored, replaced."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from ..placement.errors import ExoNodeError, LoadFailed, PeerLost, PlacementNotFound
from ..placement.ids import ModelId, NodeId, PlacementId
from ..placement.plan import PlanOptions, plan
from ..proto import peer_pb2 as pb
from .background import background
from .events import EventLog
from .records import Endpoint, Record, Status
from .restoring import Restorer
from .stages import Facts, Stages, StageSettings, specs_of

__all__ = ["Endpoint", "Facts", "Placements", "Record", "StageSettings", "Stages", "Status"]

log = logging.getLogger(__name__)

DRAIN_S = 30.0
MAX_FAILURES = 3
FAILURES_WITHIN_S = 600.0
MAX_BACKOFF_S = 30.0
REFILL_AFTER_S = 5.0
"""How long answers that are being resumed have the machine before spares are loaded."""
REFILL_EVERY_S = 10.0
ORPHAN_S = 5.0
"""A stage on a live node that belongs to no placement for this long is unloaded."""


class Placements:
    """One placement for each model at most. All methods run on the node's event loop."""

    def __init__(self, stages: Stages, facts: Facts, events: EventLog | None = None) -> None:
        """`events` hears of what a person should know."""
        self._stages = stages
        self._facts = facts
        self._events = EventLog() if events is None else events
        self._restorer = Restorer(stages, facts)
        self._records: dict[ModelId, Record] = {}
        self._loading: dict[ModelId, asyncio.Task[Record]] = {}
        self._failures: dict[ModelId, deque[float]] = {}
        self._moving: set[tuple[PlacementId, NodeId]] = set()
        self._orphans: dict[tuple[NodeId, str, int], float] = {}
        # The loop holds tasks weakly; these must live to their end.
        self._background: set[asyncio.Task[None]] = set()

    @property
    def records(self) -> list[Record]:
        return list(self._records.values())

    async def ensure(self, model: ModelId) -> Record:
        """The model's placement, loaded on first use; requests that come meanwhile share the load.

        Raises what planning and loading raise.
        """
        loading = self._loading.get(model)
        if loading is None:
            record = self._records.get(model)
            if record is not None and record.restoring is not None:
                await asyncio.shield(record.restoring)
                if record.status == "ready":
                    return record
            if record is not None and record.status == "ready" and not self._outdated(record):
                return record
            loading = self._loading.get(model)
        if loading is None:
            self._check_failures(model)
            loading = self._start(model, *self._as_before(self._records.get(model)))
        # A client that goes away must not stop the load that others wait for.
        return await asyncio.shield(loading)

    async def place(self, model: ModelId, options: PlanOptions, spares: int = 0) -> Record:
        """Plans and loads, replacing the model's placement after its requests have drained.

        `spares` of each stage are loaded afterwards, where live nodes have room.
        """
        _ = self._failures.pop(model, None)
        while (loading := self._loading.get(model)) is not None:
            _ = await asyncio.wait([loading])
        return await asyncio.shield(self._start(model, options, spares))

    async def remove(self, placement: PlacementId) -> None:
        """Unloads once its requests have drained. Raises PlacementNotFound."""
        for model, record in self._records.items():
            if record.id == placement:
                _ = self._failures.pop(model, None)
                await self._drain(model)
                return
        raise PlacementNotFound(f"no placement {placement} is here", param="id")

    def broke(self, record: Record, connections: int, why: str) -> None:
        """An attempt failed that began when the stages had been connected so many times."""
        if record.connections == connections:
            self.lost(record.id, None, why)

    def lost(self, placement: str, stage: int | None, why: str) -> None:
        """A stage is gone, or (None) some stage may be: the placement is restored.

        Requests that used it go on on what is restored; see `chat`.
        """
        for model, record in list(self._records.items()):
            if record.id != placement or record.status not in ("ready", "loading", "restoring"):
                continue
            if stage is not None:
                record.gone.add(stage)
            if record.status == "loading":
                record.status, record.error = "failed", why
            elif record.restoring is None:
                self._events.add(
                    "stage_lost",
                    f"{record.id} of {model} lost a stage: {why}",
                    model=model,
                    placement=record.id,
                    stage=stage,
                )
                record.status, record.error = "restoring", why
                record.restoring = asyncio.create_task(self._restore(model, record))

    def lost_runner(self, node: NodeId, placement: str, stage: int, why: str) -> None:
        """The runner of a stage on that node ended, be it the stage's own or a spare of it."""
        for record in self.records:
            if record.id == placement:
                self._lost_on(record, node, why, stage)

    def lost_node(self, node: NodeId, why: str) -> None:
        """As `lost`, for every stage and spare on that node."""
        for record in self.records:
            self._lost_on(record, node, why)

    def tend(self) -> None:
        """Tries again, now and then, for spares that are missing: what was in the way may go."""
        now = time.monotonic()
        for record in self.records:
            short = len(record.plan.stages) * record.spares_wanted - len(
                [spare for spare in record.spares if spare.status != "failed"]
            )
            if short and record.status == "ready" and now - record.filled_at > REFILL_EVERY_S:
                self._fill(record)

    def move_off(self, node: NodeId) -> None:
        """The node is about to leave: its stages are loaded elsewhere, then changed over to.

        Answers go on as after a loss, without waiting for a load. Where no other node has room they
        end on the node that leaves, which waits for them.
        """
        for record in self.records:
            stages = [i for i, each in enumerate(record.endpoints) if each.node == node]
            if stages and record.status == "ready" and (record.id, node) not in self._moving:
                self._moving.add((record.id, node))
                self._keep(self._move(record, stages, node))

    def succeeded(self, record: Record) -> None:
        """A generation ended well: earlier failures of the model no longer count."""
        _ = self._failures.pop(record.card.id, None)

    async def check(self, record: Record) -> None:
        """Raises PeerLost, and begins to restore, where a stage does not answer."""
        if lost := await self._restorer.lost_stages(record):
            record.gone.update(lost)
            why = f"stage {lost[0]} of {record.card.id} is gone or does not answer"
            self.lost(record.id, None, why)
            raise PeerLost(why)

    def expected(self) -> dict[NodeId, list[tuple[NodeId, str, int]]]:
        """By node, the (node, placement, stage) whose runners should be up."""
        found: dict[NodeId, list[tuple[NodeId, str, int]]] = {}
        for record in self.records:
            if record.status != "ready":
                continue
            holders = {(endpoint.node, i) for i, endpoint in enumerate(record.endpoints)}
            holders |= {(s.node, s.stage) for s in record.spares if s.status == "ready"}
            for node, stage in holders:
                found.setdefault(node, []).append((node, str(record.id), stage))
        return found

    async def sweep(self, held: Iterable[tuple[NodeId, str, int]]) -> None:
        """Unloads stages, of (node, placement, stage) that live nodes hold, which nobody uses.

        They are left by a head that is gone, or by a node that was away when it was told.
        """
        ours = {(n, str(r.id), stage) for r in self.records for n, stage in r.holders()}
        now = time.monotonic()
        strange = [key for key in held if key not in ours]
        self._orphans = {key: self._orphans.get(key, now) for key in strange}
        for node, placement, stage in [k for k, t in self._orphans.items() if now - t > ORPHAN_S]:
            log.info("unloading stage %d of %s on %s: nobody uses it", stage, placement, node)
            try:
                await self._stages.unload(node, PlacementId(placement), stage)
            except PeerLost as fault:
                log.info("%s", fault.message)

    async def close(self) -> None:
        restoring = [r.restoring for r in self.records if r.restoring is not None]
        tasks: list[asyncio.Task[Any]] = [*self._background, *self._loading.values(), *restoring]
        for task in tasks:
            task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)
        for record in self.records:
            await self._restorer.unload(record)

    def _start(self, model: ModelId, options: PlanOptions, spares: int) -> "asyncio.Task[Record]":
        task = asyncio.create_task(self._replace(model, options, spares))
        self._loading[model] = task
        task.add_done_callback(lambda done: self._loaded(model, done))
        return task

    def _loaded(self, model: ModelId, done: "asyncio.Task[Record]") -> None:
        if self._loading.get(model) is done:
            del self._loading[model]
        if not done.cancelled() and (fault := done.exception()) is not None:
            self._events.add("load_failed", f"{model} could not be placed: {fault}", model=model)

    async def _replace(self, model: ModelId, options: PlanOptions, spares: int) -> Record:
        card, fingerprint = await self._facts.card(model)
        view, refusal = self._facts.view(model), self._facts.split_refusal(model)
        planned = plan(card, view, options, pipeline_refusal=refusal)
        if model in self._records:
            await self._drain(model)
        placement = PlacementId(f"p-{secrets.token_hex(4)}")
        record = Record(placement, card, planned, options, spares_wanted=spares)
        record.see(view)
        self._records[model] = record
        try:
            await self._load(record, fingerprint)
        except ExoNodeError as fault:
            record.status, record.error = "failed", fault.message
            self._note_failure(model)
            await self._restorer.unload(record)
            if not refusal and self._facts.split_refusal(model):
                log.warning("%s is planned anew: %s", model, fault)
                _ = self._records.pop(model, None)
                return await self._replace(model, options, spares)
            raise
        except asyncio.CancelledError:
            await self._restorer.unload(record)
            raise
        self._fill(record)
        return record

    async def _load(self, record: Record, fingerprint: str) -> None:
        record.specs = specs_of(record, self._facts, fingerprint)
        record.head_asked_for = record.specs[0].native_mtp
        nodes = [stage.node for stage in record.plan.stages]

        def progress(news: pb.LoadProgress) -> None:
            share = f" {100 * news.done // news.total} %" if news.total else ""
            record.progress = news.step + share

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_flat(self._stages.load(node, spec, progress)))
                for node, spec in zip(nodes, record.specs, strict=True)
            ]
        outcomes = [task.result() for task in tasks]
        record.endpoints = [
            Endpoint(node, ready)
            for node, ready in zip(nodes, outcomes, strict=True)
            if isinstance(ready, pb.LoadReady)
        ]
        for outcome in outcomes:
            if isinstance(outcome, ExoNodeError):
                raise outcome
        await self._restorer.connect(record)
        if record.status == "failed":  # a stage was lost while others were still loading
            raise LoadFailed(record.error)
        record.take_over()
        record.status, record.progress = "ready", ""
        took = time.monotonic() - started
        self._events.add(
            "placed",
            f"placed {record.card.id} as {record.id} in {took:.1f} s: {record.plan.reason}",
            model=record.card.id,
            placement=record.id,
            seconds=round(took, 3),
        )

    def _outdated(self, record: Record) -> bool:
        """The head was left out because of a switch that is on now: load again, with it."""
        mtp = record.card.native_mtp
        if mtp is None or record.plan.mtp_off_reason or record.head_asked_for:
            return False
        return self._facts.mtp_switch(record.generator.node).enabled

    def _lost_on(self, record: Record, node: NodeId, why: str, stage: int | None = None) -> None:
        spares = [s for s in record.spares if s.node == node and stage in (None, s.stage)]
        for spare in spares:
            record.spares.remove(spare)
        for number, endpoint in enumerate(record.endpoints):
            if endpoint.node == node and stage in (None, number):
                self.lost(record.id, number, why)
        if spares and record.status == "ready":
            self._fill(record)

    async def _restore(self, model: ModelId, record: Record) -> None:
        self._note_failure(model)
        try:
            failures = len(self._recent_failures(model))
            if failures >= MAX_FAILURES:
                record.status = "degraded"
                self._events.add(
                    "degraded",
                    f"{record.id} of {model} is not restored again by itself after {failures} "
                    f"failures in a row: {record.error}",
                    model=model,
                    placement=record.id,
                )
                await self._restorer.unload(record)
                return
            if failures > 1:
                await asyncio.sleep(min(MAX_BACKOFF_S, 2.0 ** (failures - 2)))
            begun, why = time.monotonic(), record.error
            replaced = await self._restorer.restore(record)
            record.status, record.error, record.progress = "ready", "", ""
            self._tell_restored(record, replaced, time.monotonic() - begun, why)
        except ExoNodeError as fault:
            # Not as it was: the next request plans anew, with what is left.
            self._events.add(
                "load_failed",
                f"{record.id} of {model} cannot be restored: {fault.message}",
                model=model,
                placement=record.id,
            )
            record.status, record.error = "failed", fault.message
            await self._restorer.unload(record)
        finally:
            record.restoring = None
        if record.status == "ready":
            self._fill(record)

    def _tell_restored(
        self, record: Record, replaced: Sequence[int], seconds: float, why: str
    ) -> None:
        nodes = (
            ", ".join(f"stage {i} on {record.endpoints[i].node}" for i in replaced)
            or "the same runners, connected anew"
        )
        self._events.add(
            "replanned",
            f"{record.id} of {record.card.id} goes on after {seconds:.2f} s: {nodes} ({why})",
            model=record.card.id,
            placement=record.id,
            seconds=round(seconds, 3),
        )

    async def _move(self, record: Record, stages: Sequence[int], node: NodeId) -> None:
        record.spares = [spare for spare in record.spares if spare.node != node]
        for stage in stages:
            if not await self._restorer.ensure_spare(record, stage):
                log.warning("stage %d of %s stays: %s", stage, record.id, record.spares_missing)
                return
        for stage in stages:
            self.lost(record.id, stage, f"node {node} is leaving")

    def _fill(self, record: Record) -> None:
        """Ends what was replaced and loads the spares that are missing, after what is urgent."""

        async def fill() -> None:
            await self._restorer.retire(record)
            # A load takes the cores that answers in progress need to catch up.
            if record.active:
                await asyncio.sleep(REFILL_AFTER_S)
            if record.status == "ready":
                await self._restorer.refill(record)

        if record.retired or record.spares_wanted:
            record.filled_at = time.monotonic()
            self._keep(fill())

    def _as_before(self, record: Record | None) -> tuple[PlanOptions, int]:
        """What was asked of the lost placement; fewer nodes where no more are left."""
        if record is None:
            return PlanOptions(), 0
        live = {node.id for node in self._facts.view(record.card.id).nodes}
        return _possible(record.options, live), record.spares_wanted

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = background(work, "the upkeep of a placement")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _drain(self, model: ModelId) -> None:
        record = self._records[model]
        try:
            _ = await asyncio.wait_for(record.idle.wait(), DRAIN_S)
        except TimeoutError:
            log.warning("placement %s did not drain in %.0f s", record.id, DRAIN_S)
        if self._records.get(model) is record:
            del self._records[model]
        await self._restorer.unload(record)
        text = f"unloaded {record.id} of {model}"
        self._events.add("unloaded", text, model=model, placement=record.id)

    def _note_failure(self, model: ModelId) -> None:
        self._failures.setdefault(model, deque(maxlen=MAX_FAILURES)).append(time.monotonic())

    def _recent_failures(self, model: ModelId) -> list[float]:
        since = time.monotonic() - FAILURES_WITHIN_S
        return [when for when in self._failures.get(model, ()) if when > since]

    def _check_failures(self, model: ModelId) -> None:
        record = self._records.get(model)
        if record is not None and len(self._recent_failures(model)) >= MAX_FAILURES:
            raise LoadFailed(
                f"{model} failed {MAX_FAILURES} times in a row and is not tried again by itself: "
                f"{record.error}. Mend that, then load it with `POST /v1/placements`",
                param="model",
            )


def _possible(options: PlanOptions, live: set[NodeId]) -> PlanOptions:
    """The options as far as the live nodes allow: an answer matters more than where it runs."""
    pinned = [*options.nodes, *(node for node, _ in options.layers)]
    whole = all(node in live for node in pinned)
    return PlanOptions(
        min_nodes=max(1, min(options.min_nodes, len(live))),
        max_nodes=options.max_nodes,
        context=options.context,
        exclude=options.exclude,
        nodes=options.nodes if whole else (),
        layers=options.layers if whole else (),
    )


async def _flat(loading: Any) -> pb.LoadReady | ExoNodeError:
    """An outcome instead of an exception: one stage's failure must not hide where others are."""
    try:
        return await loading
    except ExoNodeError as fault:
        return fault
