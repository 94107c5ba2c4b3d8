"""Placements as others read them: made of runners after each pass, with what a person is told."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from ...placement.card import ModelCard
from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId, NodeId, PlacementId
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog, Fact, Kind
from ..runners.runner_client import Endpoint
from .loaded_placement import LoadedPlacement, Spare
from .observations import Observations
from .runner_table import plan_to_wire
from .situation import Situation, placement_of
from .stage_specs import build_specs, spec_like
from .stages import Facts
from .state import UNCONNECTED, Desired, Epoch, Runner, RunnerKey, StagedPlan

log = logging.getLogger(__name__)


class PlacementRecords:
    """Keeps `LoadedPlacement` as runners are, and adds an event where one has changed."""

    def __init__(
        self,
        facts: Facts,
        events: EventLog,
        seen: Observations,
        cards: Mapping[ModelId, ModelCard],
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._events = events
        self._seen = seen
        self._cards = cards
        self._clock = clock
        self._records: dict[PlacementId, LoadedPlacement] = {}
        self._former: dict[ModelId, LoadedPlacement] = {}
        """By model without a runner: the placement that failed, or lost them all."""
        self._specs: dict[PlacementId, list[pb.StageSpec]] = {}
        self._chips: dict[NodeId, str] = {}
        self._unloaded: set[PlacementId] = set()
        self._superseded: set[PlacementId] = set()
        self._pauses: dict[ModelId, float] = {}
        self._news = asyncio.Event()

    # ------------------------------------------------------------------ read

    def listed(self) -> list[LoadedPlacement]:
        """One for each model; of several, the one that works and is not being replaced.

        One that lost its runners is shown until another one takes its place.
        """
        shown = [r for r in self._records.values() if r.placement or r.lost_at is not None]
        shown.sort(key=self._order, reverse=True)
        return list(({**self._former, **{record.card.id: record for record in shown}}).values())

    def _order(self, record: LoadedPlacement) -> tuple[bool, bool, float]:
        is_replaced = record.id in self._seen.retiring
        return record.placement is None, is_replaced, record.begun_at

    def get(self, placement: PlacementId) -> LoadedPlacement | None:
        former = (record for record in self._former.values() if record.id == placement)
        return self._records.get(placement) or next(former, None)

    def of_model(self, model: ModelId) -> list[LoadedPlacement]:
        return [record for record in self._records.values() if record.card.id == model]

    def answers(self) -> frozenset[tuple[PlacementId, Epoch]]:
        """The placements and epochs that answers run in."""
        return frozenset(
            (record.id, epoch)
            for record in self._records.values()
            for epoch in record.activity.answers
        )

    async def wait_for_end(self, within_s: float) -> None:
        """Returns once a placement has lost its last runner, or after so long."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                _ = await self._news.wait()

    # ------------------------------------------------------------------ actions

    def requested(self, key: RunnerKey, plan: StagedPlan, fingerprint: str, lease_s: int) -> Runner:
        """The runner of a load that begins now."""
        card, placement = self._cards[plan.model], key.placement
        self._see(plan.model)
        if placement not in self._specs:
            self._specs[placement] = self._build(key, plan, card, fingerprint, lease_s)
        spec = self._specs[placement][key.stage]
        runner = Runner(key, plan, "loading", self._clock(), spec=spec)
        self._seen.runners.put(runner)
        return runner

    def _build(
        self, key: RunnerKey, plan: StagedPlan, card: ModelCard, fingerprint: str, lease_s: int
    ) -> list[pb.StageSpec]:
        others = (r.spec for r in self._seen.runners.all if r.key.placement == key.placement)
        other = next((spec for spec in others if spec is not None), None)
        if other is not None:
            return [spec_like(other, card, plan.plan, number) for number in range(len(plan))]
        generator = plan.nodes[0]
        specs = build_specs(
            key.placement,
            card,
            plan.plan,
            self._facts.stage_settings(generator),
            self._facts.mtp_switch(generator),
            fingerprint=fingerprint,
            lease_s=lease_s,
        )
        for spec in specs:
            spec.plan.CopyFrom(plan_to_wire(plan))
        return specs

    def note_step(self, placement: PlacementId, step: str) -> None:
        """Notes the present step of a load, for a person."""
        if (record := self._records.get(placement)) is not None:
            record.step = step

    def note_unload(self, key: RunnerKey) -> None:
        self._unloaded.add(key.placement)

    def note_loss(self, runner: Runner, why: str) -> None:
        """The runner of a stage is gone or hangs."""
        record = self._records.get(runner.key.placement)
        if record is None or record.owners.get(runner.key.stage) is None:
            return
        if record.owners[runner.key.stage].key != runner.key or record.lost_at is not None:
            return
        record.why = why
        if record.proven:
            record.lost_at = self._clock()
            text = f"{record.id} of {record.card.id} lost a stage: {why}"
            self._add("stage_lost", text, record, stage=runner.key.stage)

    def note_failure(self, model: ModelId, error: ExoNodeError) -> None:
        """The model was given up for a while."""
        record = next(iter(self.of_model(model)), self._former.get(model))
        if record is not None:
            record.error = error.message
            self._former[model] = record
        if record is not None and record.lost_at is not None:
            text = f"{record.id} of {model} cannot be restored: {error.message}"
            self._add("load_failed", text, record)
        else:
            text = f"{model} could not be placed: {error.message}"
            _ = self._events.add("load_failed", text, model=model)

    def note_failed_spare(self, runner: Runner, error: ExoNodeError) -> None:
        if (record := self._records.get(runner.key.placement)) is not None:
            _, _, stage = runner.key
            spare = Spare(stage, runner.key.node, error=error.message)
            record.failed_spares = {**record.failed_spares, stage: spare}

    def forget_failed(self, model: ModelId) -> None:
        _ = self._former.pop(model, None)

    # ------------------------------------------------------------------ after a pass

    def update(self, here: Situation, *, adopts: bool = False) -> None:
        """Makes the records as the runners are now."""
        groups: dict[PlacementId, list[Runner]] = {}
        for runner in self._seen.runners.all:
            if runner.plan.model in self._cards and here.is_healthy(runner):
                groups.setdefault(runner.key.placement, []).append(runner)
        for name, runners in groups.items():
            self._update(name, runners, here, adopts=adopts)
        present = {runner.key.placement for runner in self._seen.runners.all}
        for name, record in list(self._records.items()):
            if name not in groups:
                record.placement = None
            if name not in present:
                self._drop(record)
        for desired in here.desired:
            self._update_former(desired)
            self._note_pause(here, desired)
        self._note_spares(here)
        self._note_superseded(here)

    def _update(
        self, name: PlacementId, runners: list[Runner], here: Situation, *, adopts: bool
    ) -> None:
        plan, chips = runners[0].plan, self._chips
        adopts = adopts or all(runner.adopted for runner in runners)
        record = self._records.get(name)
        if record is None:
            proven = plan.model in self._seen.proven
            record = LoadedPlacement(name, self._cards[plan.model], plan, proven, chips=chips)
            record.begun_at = self._clock()
            record.moved = "fewer nodes are here than were asked for" if plan.displaced else ""
            self._records[name] = record
            if adopts:
                model = plan.model
                record.proven = True
                self._see(model)
                text = f"goes on with {name} of {model}, which the last head placed"
                self._add("adopted", text, record)
        before = record.placement
        record.placement = placement_of(name, runners, here.draining)
        if record.placement.connected and not (before is not None and before.connected):
            self._note_ready(record, first=before is None or not record.proven, adopts=adopts)

    def _note_ready(self, record: LoadedPlacement, *, first: bool, adopts: bool) -> None:
        model, now = record.card.id, self._clock()
        self._see(model)
        record.step = record.error = ""
        self._seen.proven.add(model)
        _ = self._former.pop(model, None)
        was_proven, record.proven = record.proven, True
        names = {node.id: node.name for node in self._facts.view(model).nodes}
        if moves := record.moves(names):
            record.moved = f"since then {moved(moves, record.why)}"
        if adopts:
            record.lost_at = None
            return
        if record.lost_at is None:
            if first or not was_proven or not record.moved:
                took = now - record.begun_at
                text = f"placed {model} as {record.id} in {took:.1f} s: {record.plan.reason}"
                self._add("placed", text, record, seconds=round(took, 3))
            return
        took, record.lost_at = now - record.lost_at, None
        where = ", ".join(
            f"stage {number} on {runner.key.node}" for number, runner in record.owners.items()
        )
        text = f"{record.id} of {model} goes on after {took:.2f} s: {where} ({record.why})"
        self._add("replanned", text, record, seconds=round(took, 3))

    def _drop(self, record: LoadedPlacement) -> None:
        """Its last runner is gone."""
        self._news.set()
        model, is_replaced = record.card.id, record.id in self._seen.retiring
        del self._records[record.id]
        _ = self._specs.pop(record.id, None)
        is_unloaded = record.id in self._unloaded
        self._unloaded.discard(record.id)
        if is_unloaded:
            self._add("unloaded", f"unloaded {record.id} of {model}", record)
        if self.of_model(model):
            return
        if record.lost_at is not None or record.error or not is_unloaded:
            self._former[model] = record
        elif not is_replaced:
            self._seen.proven.discard(model)

    def _update_former(self, desired: Desired) -> None:
        """A placement that lost its runners is shown until another one takes its place."""
        record = self._former.get(desired.model)
        if record is not None and not record.error and desired.used_at == float("-inf"):
            del self._former[desired.model]

    def _note_pause(self, here: Situation, desired: Desired) -> None:
        """Says so where a load waits for the end of a pause."""
        record = self._former.get(desired.model) or next(iter(self.of_model(desired.model)), None)
        failures = [f for f in here.failures(desired) if f.kind in ("loss", "load")]
        if record is None or not failures or record.status in ("ready", "failed"):
            return
        missing = None if record.placement is None else record.placement.missing
        pause_s, last = here.pause_s(desired, missing), failures[-1]
        if here.now < last.at + pause_s:
            text = f"{last.error.message}; loaded again in {pause_s:.0f} s, after losses in a row"
            record.step = text
            if self._pauses.get(desired.model) != last.at:
                self._pauses[desired.model] = last.at
                self._add("stage_lost", f"{record.id} of {desired.model}: {text}", record)

    def _note_spares(self, here: Situation) -> None:
        spares = {each.model: each.spares for each in here.desired}
        for record in self._records.values():
            if record.placement is None:
                continue
            others = [r for r in record.placement.others if r.epoch == UNCONNECTED]
            record.spares = [_spare(runner) for runner in others]
            spared = {spare.stage for spare in record.spares}
            short = [
                stage
                for stage in range(len(record.staged))
                if len(record.placement.spares(stage)) < spares.get(record.card.id, 0)
            ]
            failed = {
                s: e for s, e in record.failed_spares.items() if s in short and s not in spared
            }
            record.failed_spares = failed
            record.spares += failed.values()
            record.spares_missing = ""
            if failed:
                record.spares_missing = next(iter(failed.values())).error
            elif short and record.placement.connected and not spared.issuperset(short):
                record.spares_missing = (
                    f"no live node has room for a spare of stage {short[0]} beside what it holds; "
                    "start a node, or free memory on one"
                )

    def _note_superseded(self, here: Situation) -> None:
        for desired in here.desired:
            current = here.current(desired)
            for record in self.of_model(desired.model):
                other = record.placement
                if current is None or other is None or record.id == current.id:
                    continue
                adopted = all(runner.adopted for runner in other.runners)
                if not adopted or record.id in {*self._seen.retiring, *self._superseded}:
                    continue
                self._superseded.add(record.id)
                text = f"{record.id} of {desired.model} was placed at a head that is none now, and "
                text += "this one has a placement of its own; answers on it run to their end"
                self._add("superseded", text, record)

    def _see(self, model: ModelId) -> None:
        """Remembers the chips of the live nodes: a lost one's is asked for afterwards."""
        view = self._facts.view(model)
        self._chips.update({node.id: f"{node.backend} {node.chip}" for node in view.nodes})

    def clear(self) -> None:
        """Another node leads."""
        for marks in (self._records, self._former, self._specs, self._unloaded, self._superseded):
            marks.clear()
        self._news.set()

    def _add(self, kind: Kind, text: str, record: LoadedPlacement, **facts: Fact) -> None:
        _ = self._events.add(kind, text, model=record.card.id, placement=record.id, **facts)


def moved(moves: str, why: str) -> str:
    return f"{moves} ({why})" if why else moves


def _spare(runner: Runner) -> Spare:
    node = runner.key.node
    endpoint = None if runner.ready is None else Endpoint(node, runner.ready)
    return Spare(runner.key.stage, node, endpoint)
