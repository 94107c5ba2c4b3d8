"""Performs the reconciler's actions on runners, and notes outcomes and losses for the next pass."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...placement.card import ModelCard
from ...placement.errors import (
    ExoNodeError,
    InvalidCard,
    InvalidCheckpoint,
    InvalidRequest,
    PeerLost,
)
from ...placement.ids import NodeId, PlacementId
from ...placement.kv_bits import FIELD as KV_BITS
from ...proto import peer_pb2 as pb
from ..links.measurements import CHUNK
from ..machine.tasks import background
from ..machine.timing import Timing
from ..runners.runner_client import Endpoint
from .loaded_placement import epoch_to_wire
from .observations import Observations
from .placement_records import PlacementRecords
from .plan_wire import plan_to_wire
from .stage_specs import build_specs, reader_spec, spec_like
from .stages import Facts, Stages
from .state import Connect, Epoch, FailureKind, Load, RunnerKey, StagedPlan, StageRunner, Unload

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class StageActions:
    """Has a task for each load, connection and unload; `close` ends them."""

    _stages: Stages
    _facts: Facts
    _observations: Observations
    _timing: Timing
    _records: PlacementRecords
    _changed: Callable[[], None]
    """Called after each outcome, and after each loss."""

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[RunnerKey, asyncio.Task[None]] = {}
        self.busy: set[PlacementId] = set()
        """Placements whose runners are being connected or pinged."""

    def load(self, action: Load, card: ModelCard, fingerprint: str, now: float) -> None:
        """The runner is in the table as loading until the outcome is known."""
        spec = self._spec(action, card, fingerprint)
        runner = StageRunner(action.key, action.plan, "loading", now, spec=spec)
        self._observations.count()
        self._observations.add(runner)
        task = self._start(self._load(runner, spec, action.extra), "the load of a stage")
        self._loads[runner.key] = task

    def connect(self, action: Connect) -> None:
        self._observations.count()
        self.busy.add(action.placement)
        _ = self._start(self._connect(action), "the connection of a placement")

    def unload(self, action: Unload) -> None:
        """The runner is in the table as stopping until it is gone."""
        key = action.key
        log.info("%s/%d on %s is unloaded: %s", key.placement, key.stage, key.node, action.why)
        self._observations.change(key, state="stopping")
        if (load := self._loads.pop(key, None)) is not None:
            _ = load.cancel()
        _ = self._start(self._unload(key, load, kill=action.kill), "the end of a runner")

    def probe(self, owners: Sequence[StageRunner], why: str, broken: Epoch | None = None) -> None:
        """Pings runners of one placement, and notes those that do not answer.

        `broken`: the epoch in which an answer was lost, noted where all of them answer.
        """
        placement = owners[0].key.placement
        if placement not in self.busy:
            self.busy.add(placement)
            _ = self._start(self._probe(placement, owners, why, broken), "pings of a placement")

    def note_broken(
        self, placement: PlacementId, epoch: Epoch, why: str, lost_stages: Iterable[int] = ()
    ) -> None:
        """An answer of that epoch was lost. `lost_stages` did not answer it.

        Reports of several answers come one after the other: a runner that has taken the place of a
        lost one meanwhile was in none of them.
        """
        record = self._records.get(placement)
        if record is None or record.placement is None or epoch != record.epoch:
            return
        members = {stage: each for stage, each in record.owners.items() if each.epoch == epoch}
        lost = list(lost_stages)
        for stage in lost:
            if stage in members:
                self._observations.silence(members[stage], why)
        if lost:
            self._changed()
        else:
            self.probe(list(members.values()), why, broken=epoch)

    def note_ended(self, node: NodeId, placement: str, stage: int, why: str) -> None:
        """The runner of a stage on that node ended."""
        runner = self._observations.get(RunnerKey(node, PlacementId(placement), stage))
        if runner is not None and runner.state == "ready":
            self._observations.end(runner, why)
            self._changed()

    def note_node_lost(self, node: NodeId, why: str) -> None:
        """All runners on that node are gone."""
        self._observations.end_node(node, why)
        self._changed()

    async def close(self) -> None:
        """Ends what is in progress; more may be started afterwards."""
        tasks = list(self._tasks)
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)
        self._loads.clear()
        self.busy.clear()

    def _start(self, work: Coroutine[None, None, None], what: str) -> "asyncio.Task[None]":
        task = background(work, what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _spec(self, action: Load, card: ModelCard, fingerprint: str) -> pb.StageSpec:
        """All stages of a placement run with the settings of its first load."""
        key, plan = action.key, action.plan
        runners = (r for r in self._observations.runners if r.key.placement == key.placement)
        if (other := next((r.spec for r in runners if r.spec is not None), None)) is not None:
            if plan.reader is not None:
                spec = reader_spec(other, card, plan.plan, plan.reader[0], key.stage)
                spec.plan.CopyFrom(plan_to_wire(plan))
                return spec
            return spec_like(other, card, plan.plan, key.stage)
        generator = plan.nodes[0]
        specs = build_specs(
            key.placement,
            card,
            plan.plan,
            self._facts.stage_settings(generator),
            self._facts.mtp_switch(generator),
            fingerprint=fingerprint,
            lease_s=self._timing.state_lease_s,
        )
        spec = specs[key.stage]
        spec.plan.CopyFrom(plan_to_wire(plan))
        spec.drafter_required = bool(spec.plan.desired.drafter.model)
        return spec

    async def _load(self, runner: StageRunner, spec: pb.StageSpec, extra: bool) -> None:
        key, plan = runner.key, runner.plan
        refusal = self._facts.split_refusal(plan.model)

        def progress(news: pb.LoadProgress) -> None:
            share = f" {100 * news.done // news.total} %" if news.total else ""
            self._records.note_step(key.placement, news.step + share)

        try:
            ready = await self._stages.load(key.node, spec, progress)
        except ExoNodeError as fault:
            kind = self._kind(fault, extra=extra)
            if self._facts.split_refusal(plan.model) != refusal or self._replans(plan, fault):
                kind = "plan"
            if fault.param == CHUNK:
                kind = "plan"
                await asyncio.sleep(self._timing.watch_s)  # its node's report will show the limit
            log.warning("stage %d of %s: %s", key.stage, key.placement, fault.message)
            self._observations.fail(runner, kind, fault)
            self._observations.remove(key)
        else:
            self._observations.change(key, state="ready", ready=ready)
        finally:
            _ = self._loads.pop(key, None)
            self._changed()

    def _replans(self, plan: StagedPlan, fault: ExoNodeError) -> bool:
        """Whether the load showed that quantised caches, which no card asked for, cannot be."""
        is_setting = plan.plan.kv_bits.source != "card" and fault.param == KV_BITS
        return is_setting and bool(self._facts.view(plan.model).kv_refusal(plan.model))

    @staticmethod
    def _kind(fault: ExoNodeError, *, extra: bool) -> FailureKind:
        if isinstance(fault, PeerLost):
            return "node"
        if extra:
            return "extra"
        return "files" if isinstance(fault, InvalidCheckpoint | InvalidCard) else "load"

    async def _connect(self, action: Connect) -> None:
        """Every runner enters the epoch; then each is connected to the next, the last to the first.

        Runners that do not answer are marked silent. The placement stays busy for a moment after
        a connection that failed, so that it is not repeated at once.
        """
        runners = [self._observations.get(key) for key in action.runners]
        endpoints = [
            Endpoint(runner.key.node, runner.ready)
            for runner in runners
            if runner is not None and runner.ready is not None
        ]
        try:
            if len(endpoints) < len(action.runners):
                return
            if await self._joined(action, endpoints):
                for key in action.runners:
                    self._observations.change(key, epoch=action.epoch)
                return
            owners = [runner for runner in runners if runner is not None]
            silent = await self._silent(owners)
            for runner, fault in silent.items():
                self._observations.silence(runner, fault)
            if not silent:
                await asyncio.sleep(self._timing.watch_s)
        finally:
            self.busy.discard(action.placement)
            self._changed()

    async def _joined(self, action: Connect, endpoints: Sequence[Endpoint]) -> bool:
        placement, epoch = action.placement, epoch_to_wire(action.epoch)
        entering = [
            self._stages.enter(endpoint, placement, number, epoch)
            for number, endpoint in enumerate(endpoints)
        ]
        following = [*endpoints[1:], endpoints[0]]
        for fault in await _faults(entering):
            log.warning("%s: %s while it was connected", placement, fault.message)
            if isinstance(fault, InvalidRequest):
                await asyncio.sleep(self._timing.watch_s)  # its report will show the later epoch
            return False
        if len(endpoints) == 1:
            return True
        connecting = [
            self._stages.connect(endpoint, after, placement, epoch)
            for endpoint, after in zip(endpoints, following, strict=True)
        ]
        faults = await _faults(connecting)
        for fault in faults:
            log.warning("%s: %s while it was connected", placement, fault.message)
        return not faults

    async def _probe(
        self, placement: PlacementId, owners: Sequence[StageRunner], why: str, broken: Epoch | None
    ) -> None:
        try:
            silent = await self._silent(owners)
            for runner in silent:
                self._observations.silence(runner, why)
            if broken is not None and not silent:
                self._observations.broken[placement] = broken
        finally:
            self.busy.discard(placement)
            self._changed()

    async def _silent(self, owners: Sequence[StageRunner]) -> Mapping[StageRunner, str]:
        """The runners that do not answer a ping, and why."""
        faults = await asyncio.gather(*(self._ping_fault(runner) for runner in owners))
        return {runner: fault for runner, fault in zip(owners, faults, strict=True) if fault}

    async def _ping_fault(self, runner: StageRunner) -> str:
        if runner.ready is None:
            return "it is not ready"
        endpoint = Endpoint(runner.key.node, runner.ready)
        try:
            _ = await self._stages.ping(endpoint, runner.key.placement, runner.key.stage)
        except ExoNodeError as fault:
            log.info("stage %d of %s: %s", runner.key.stage, runner.key.placement, fault.message)
            return fault.message
        return ""

    async def _unload(
        self, key: RunnerKey, load: "asyncio.Task[None] | None", *, kill: bool
    ) -> None:
        """A node that does not answer now is dead, or unloads the runner when it is back."""
        runner = self._observations.get(key)
        if load is not None:
            _ = await asyncio.gather(load, return_exceptions=True)
        try:
            await self._stages.unload(key.node, key.placement, key.stage, kill=kill)
        except PeerLost as fault:
            log.info("stage %d of %s went with its node: %s", key.stage, key.placement, fault)
            if runner is not None:
                self._observations.fail(runner, "node", fault)
        finally:
            self._observations.remove(key)
            self._changed()
        if runner is not None and runner.ready is not None:
            await self._stages.forget(Endpoint(key.node, runner.ready))


async def _faults(calls: Sequence[Awaitable[object]]) -> list[ExoNodeError]:
    """The errors of calls that are made at once; one's does not hide the others'."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, ExoNodeError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, ExoNodeError)]
