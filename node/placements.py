"""The head's placements: planned, loaded over the nodes, connected, watched, replaced."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..placement.card import ModelCard
from ..placement.cluster import ClusterView
from ..placement.drafting import EnabledState, HeadState, choose_drafting
from ..placement.errors import ExoNodeError, LoadFailed, PeerLost, PlacementNotFound
from ..placement.ids import ModelId, NodeId, PlacementId
from ..placement.plan import Placement, plan
from ..proto import peer_pb2 as pb
from .background import background

log = logging.getLogger(__name__)

Status = Literal["loading", "ready", "degraded", "failed"]

DRAIN_S = 30.0
MAX_FAILURES = 3
FAILURES_WITHIN_S = 600.0
PREFILL_CHUNK = 512
LEASE_S = 10


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A loaded stage that can be called."""

    node: NodeId
    ready: pb.LoadReady


class Stages(Protocol):
    """How stages are started and reached, here or on another node."""

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady: ...

    async def unload(self, node: NodeId, placement: PlacementId, stage: int) -> None: ...

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        """Tells a stage's runner where the next one is. Raises PeerLost."""
        ...

    async def forget(self, stage: Endpoint) -> None:
        """Closes what leads to a runner that is gone."""
        ...


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What a generator's node decides about the models it generates with."""

    dtype: str
    async_draft_eval: bool = True
    adaptive_draft: bool = True
    strict_rows: int = 0
    """Strict mode: 0 off; else every decode forward has as many rows, at least max_k + 1."""

    def rows_for(self, max_k: int) -> int:
        """Rows of every decode forward of a model that may draft `max_k` tokens; 0: as needed."""
        return max(max_k + 1, self.strict_rows) if self.strict_rows else 0


class Facts(Protocol):
    """What placing asks of the node."""

    def view(self, placing: ModelId) -> ClusterView:
        """The live nodes, with the memory that other models than `placing` leave."""
        ...

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card, and the fingerprint of this node's files ("" where it has none)."""
        ...

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        """The native-MTP switch as it holds for a generator on that node."""
        ...

    def stage_settings(self, generator: NodeId, card: ModelCard) -> StageSettings:
        """What the generator's node decides."""
        ...


@dataclass(slots=True)
class Record:
    """One placement and what became of it."""

    id: PlacementId
    card: ModelCard
    plan: Placement
    status: Status = "loading"
    error: str = ""
    progress: str = ""
    endpoints: list[Endpoint] = field(default_factory=list[Endpoint])
    head_asked_for: bool = False
    head: HeadState = field(default_factory=lambda: HeadState(False, "not loaded"))
    identity: str = "off"
    """greedy_identity as the generator measured it at load."""
    active: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def generator(self) -> Endpoint:
        return self.endpoints[0]

    def begin(self) -> None:
        """A request starts to use it; it is not unloaded before `end`."""
        self.active += 1
        self.idle.clear()

    def end(self) -> None:
        self.active -= 1
        if self.active == 0:
            self.idle.set()


class Placements:
    """One placement for each model at most. All methods run on the node's event loop."""

    def __init__(self, stages: Stages, facts: Facts) -> None:
        self._stages = stages
        self._facts = facts
        self._records: dict[ModelId, Record] = {}
        self._loading: dict[ModelId, asyncio.Task[Record]] = {}
        self._failures: dict[ModelId, deque[float]] = {}
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
            if record is not None and record.status == "ready" and not self._outdated(record):
                return record
            self._check_failures(model)
            min_nodes = self._nodes_again(record)
            loading = self._start(model, min_nodes)
        # A client that goes away must not stop the load that others wait for.
        return await asyncio.shield(loading)

    async def place(self, model: ModelId, min_nodes: int) -> Record:
        """Plans and loads, replacing the model's placement after its requests have drained."""
        _ = self._failures.pop(model, None)
        while (loading := self._loading.get(model)) is not None:
            _ = await asyncio.wait([loading])
        return await asyncio.shield(self._start(model, min_nodes))

    async def remove(self, placement: PlacementId) -> None:
        """Unloads once its requests have drained. Raises PlacementNotFound."""
        for model, record in self._records.items():
            if record.id == placement:
                _ = self._failures.pop(model, None)
                await self._drain(model)
                return
        raise PlacementNotFound(f"no placement {placement} is here", param="id")

    def lost(self, placement: str, stage: int, why: str) -> None:
        """A stage's runner or node is gone: its requests fail, the next one loads it anew."""
        for model, record in list(self._records.items()):
            if record.id == placement and record.status in ("ready", "loading"):
                record.status, record.error = "failed", why
                log.warning("placement %s of %s lost stage %d: %s", record.id, model, stage, why)
                self._note_failure(model)
                self._keep(self._recover(model, record))

    def lost_node(self, node: NodeId, why: str) -> None:
        """As `lost`, for every stage on that node."""
        for record in self.records:
            for stage, endpoint in enumerate(record.endpoints):
                if endpoint.node == node:
                    self.lost(record.id, stage, why)

    def succeeded(self, record: Record) -> None:
        """A generation ended well: earlier failures of the model no longer count."""
        _ = self._failures.pop(record.card.id, None)

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._background, *self._loading.values()]
        for task in tasks:
            task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)
        for record in self.records:
            await self._unload(record)

    def _start(self, model: ModelId, min_nodes: int) -> "asyncio.Task[Record]":
        task = asyncio.create_task(self._replace(model, min_nodes))
        self._loading[model] = task
        task.add_done_callback(lambda done: self._loaded(model, done))
        return task

    def _loaded(self, model: ModelId, done: "asyncio.Task[Record]") -> None:
        if self._loading.get(model) is done:
            del self._loading[model]
        if not done.cancelled() and (fault := done.exception()) is not None:
            log.error("%s could not be placed: %s", model, fault)

    async def _replace(self, model: ModelId, min_nodes: int) -> Record:
        card, fingerprint = await self._facts.card(model)
        planned = plan(card, self._facts.view(model), min_nodes=min_nodes)
        if model in self._records:
            await self._drain(model)
        record = Record(PlacementId(f"p-{secrets.token_hex(4)}"), card, planned)
        record.idle.set()
        self._records[model] = record
        try:
            await self._load(record, fingerprint)
        except ExoNodeError as fault:
            record.status, record.error = "failed", fault.message
            self._note_failure(model)
            await self._unload(record)
            raise
        except asyncio.CancelledError:
            await self._unload(record)
            raise
        return record

    async def _load(self, record: Record, fingerprint: str) -> None:
        specs = self._specs(record, fingerprint)
        record.head_asked_for = specs[0].native_mtp
        nodes = [stage.node for stage in record.plan.stages]

        def progress(news: pb.LoadProgress) -> None:
            share = f" {100 * news.done // news.total} %" if news.total else ""
            record.progress = news.step + share

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_flat(self._stages.load(node, spec, progress)))
                for node, spec in zip(nodes, specs, strict=True)
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
        if len(record.endpoints) > 1:
            following = [*record.endpoints[1:], record.endpoints[0]]
            for stage, after in zip(record.endpoints, following, strict=True):
                await self._stages.connect(stage, after, record.id)
        if record.status == "failed":  # a stage was lost while others were still loading
            raise LoadFailed(record.error)
        mtp_head = record.generator.ready.mtp_head
        record.identity = record.generator.ready.greedy_identity
        record.head = HeadState(mtp_head == "loaded", "" if mtp_head == "loaded" else mtp_head)
        record.status, record.progress = "ready", ""
        took = time.monotonic() - started
        log.info(
            "placed %s as %s in %.1f s: %s", record.card.id, record.id, took, record.plan.reason
        )

    def _specs(self, record: Record, fingerprint: str) -> list[pb.StageSpec]:
        card, stages = record.card, record.plan.stages
        settings = self._facts.stage_settings(stages[0].node, card)
        mtp = card.native_mtp
        switch = self._facts.mtp_switch(stages[0].node)
        drafting = choose_drafting(card, len(stages), HeadState(True), switch, None)
        off = record.plan.mtp_off_reason or (drafting.reason if drafting.k == 0 else "")
        return [
            pb.StageSpec(
                placement=record.id,
                model=card.id,
                stage=number,
                num_stages=len(stages),
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                num_layers=card.num_layers,
                checkpoint_sha256=fingerprint,
                dtype=settings.dtype,
                prefill_chunk=PREFILL_CHUNK,
                context_length=record.plan.context_length,
                native_mtp=not off,
                max_draft_tokens=mtp.max_k if mtp else 0,
                async_draft_eval=settings.async_draft_eval,
                fixed_rows=settings.rows_for(mtp.max_k) if mtp else 0,
                draft_vocabulary=mtp.draft_vocabulary if mtp else 0,
                mtp_hidden=mtp.hidden if mtp else "",
                lease_s=LEASE_S,
                mtp_off_reason=off,
            )
            for number, stage in enumerate(stages)
        ]

    def _outdated(self, record: Record) -> bool:
        """The head was left out because of a switch that is on now: load again, with it."""
        mtp = record.card.native_mtp
        if mtp is None or record.plan.mtp_off_reason or record.head_asked_for:
            return False
        return self._facts.mtp_switch(record.generator.node).enabled

    async def _recover(self, model: ModelId, record: Record) -> None:
        await self._unload(record)
        failures = len(self._recent_failures(model))
        if failures >= MAX_FAILURES:
            record.status = "degraded"
            return
        if model not in self._loading and self._records.get(model) is record:
            task = self._start(model, self._nodes_again(record))
            _ = await asyncio.wait([task])

    def _nodes_again(self, record: Record | None) -> int:
        """As many nodes as the lost placement had; fewer where no more are left."""
        if record is None:
            return 1
        return min(len(record.plan.stages), len(self._facts.view(record.card.id).nodes))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = background(work, "the recovery of a placement")
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
        await self._unload(record)

    async def _unload(self, record: Record) -> None:
        for number, stage in enumerate(record.plan.stages):
            try:
                await self._stages.unload(stage.node, record.id, number)
            except PeerLost as fault:
                log.info("stage %d of %s went with its node: %s", number, record.id, fault)
        for endpoint in record.endpoints:
            await self._stages.forget(endpoint)

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


async def _flat(loading: Any) -> pb.LoadReady | ExoNodeError:
    """An outcome instead of an exception: one stage's failure must not hide where others are."""
    try:
        return await loading
    except ExoNodeError as fault:
        return fault
