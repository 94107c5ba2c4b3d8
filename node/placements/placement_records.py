"""Placements as others read them: derived from runners after each pass, with their events."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from ...placement.card import ModelCard
from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.reasons import first_clause
from ..cluster.desired import Desired
from ..machine.events import EventLog, Fact, Kind
from .loaded_placement import LoadedPlacement
from .observations import Observations
from .situation import ObservedPlacement, Situation
from .stages import Facts
from .state import Demand, Epoch, RunnerKey


@dataclass(eq=False, repr=False)
class PlacementRecords:
    """One `LoadedPlacement` for each name that runners carry, and one for each model without."""

    _facts: Facts
    _events: EventLog
    _observations: Observations
    _cards: Mapping[ModelId, ModelCard]
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._records: dict[PlacementId, LoadedPlacement] = {}
        self._chips: dict[NodeId, str] = {}
        """Chips of nodes that were live, since a lost one's is needed afterwards."""
        self._ended = asyncio.Event()

    def listed(self) -> list[LoadedPlacement]:
        """The replicas of each model; without any, the placement that comes closest to one."""
        visible = [
            record
            for record in self._records.values()
            if record.placement or record.lost_at is not None or record.is_former or record.error
        ]
        visible.sort(key=self._order, reverse=True)
        closest = {record.card.id: record for record in visible}
        replicas = [r for r in visible if r.placement and r.id not in self._observations.retiring]
        return list({record.id: record for record in [*replicas, *closest.values()]}.values())

    def _order(self, record: LoadedPlacement) -> tuple[bool, bool, bool, float]:
        is_replaced = record.id in self._observations.retiring
        return record.is_former, record.placement is None, is_replaced, record.begun_at

    def get(self, placement: PlacementId) -> LoadedPlacement | None:
        return self._records.get(placement)

    def of_model(self, model: ModelId) -> list[LoadedPlacement]:
        """All of the model; those with runners come first."""
        records = [record for record in self._records.values() if record.card.id == model]
        return sorted(records, key=lambda record: record.is_former)

    def answers(self, given_since: float) -> Mapping[tuple[PlacementId, Epoch], int]:
        """See `Observed.answers`; an answer counts from when it is given its placement."""
        answers = Counter[tuple[PlacementId, Epoch]]()
        for record in self._records.values():
            activity = record.activity
            activity.given_at = [at for at in activity.given_at if at >= given_since]
            if activity.given_at:
                answers[record.id, record.epoch] = len(activity.given_at)
            for epoch, count in activity.answers.items():
                answers[record.id, epoch] += count
        return answers

    def demand(self) -> Mapping[PlacementId, Demand]:
        return {name: record.activity.demand for name, record in self._records.items()}

    async def wait_for_end(self, within_s: float) -> None:
        """Returns once a placement has lost its last runner, or after that time."""
        self._ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                _ = await self._ended.wait()

    def note_step(self, placement: PlacementId, step: str) -> None:
        if (record := self._records.get(placement)) is not None:
            record.step = step

    def note_unload(self, key: RunnerKey) -> None:
        if (record := self._records.get(key.placement)) is not None:
            record.is_unloaded = True

    def note_failure(self, model: ModelId, error: ExoNodeError) -> None:
        """The model was given up for a while."""
        record = next(iter(self.of_model(model)), None)
        if record is not None:
            record.error = error.message
        if record is not None and record.lost_at is not None:
            text = f"{model} cannot be restored: {error.message}"
            self._add("load_failed", text, record)
        else:
            text = f"{model} could not be placed: {error.message}"
            _ = self._events.add("load_failed", text, model=model)

    def forget_failed(self, model: ModelId) -> None:
        for record in self.of_model(model):
            if record.is_former:
                del self._records[record.id]

    def update(self, here: Situation, *, adopts: bool = False) -> None:
        """Makes the records as the runners are now."""
        all_models = [each for model, each in here.placements.items() if model in self._cards]
        placements = {placement.id: placement for each in all_models for placement in each}
        for placement in placements.values():
            self._update(placement, adopts=adopts)
        present = {runner.key.placement for runner in here.observed.runners}
        used = {each.model for each in here.desired if each.used_at > -inf}
        for name, record in list(self._records.items()):
            if name not in placements:
                self._set_placement(record, None)
            if name not in present and not record.is_former:
                self._end(record)
            elif record.is_former and not record.error and record.card.id not in used:
                del self._records[name]
        for record in self._records.values():
            record.activity.note(here.now, here.timing.claim_grace_s)
        for desired in here.desired:
            self._note_pause(here, desired)
            self._note_superseded(here, desired)

    def _update(self, placement: ObservedPlacement, *, adopts: bool) -> None:
        adopts = adopts or all(runner.adopted for runner in placement.runners)
        record = self._records.get(placement.id)
        if record is None or record.is_former:
            record = self._begin(placement, adopts=adopts)
        before = record.placement
        self._set_placement(record, placement)
        if placement.connected and not (before is not None and before.connected):
            self._note_ready(record, first=before is None or not record.proven, adopts=adopts)
        elif placement.connected and before is not None and placement.nodes != before.nodes:
            self._note_moved(record)

    def _set_placement(self, record: LoadedPlacement, placement: ObservedPlacement | None) -> None:
        """Notes a loss where it was connected and the runner of a stage is gone or hangs."""
        before, record.placement = record.placement, placement
        if before is None or not before.connected or (placement and placement.connected):
            return
        for failure in self._observations.failures:
            owner = before.owners.get(failure.stage)
            if (
                failure.placement == record.id
                and failure.kind in ("loss", "gone")
                and failure.at >= before.loaded_at
                and owner is not None
                and owner.key.node == failure.node
            ):
                record.lost_at, record.why = self._clock(), failure.error.message
                name = self._facts.name(failure.node)
                text = f"{record.card.id} lost its layers on {name}: {record.why}"
                self._add("stage_lost", text, record, stage=failure.stage)
                return

    def _begin(self, placement: ObservedPlacement, *, adopts: bool) -> LoadedPlacement:
        name, plan, model = placement.id, placement.plan, placement.plan.model
        self._note_chips(model)
        proven = adopts or model in self._observations.proven
        card = placement.plan.options.apply(self._cards[model])
        record = LoadedPlacement(name, card, plan, proven, chips=self._chips)
        record.begun_at = self._clock()
        record.moved = "fewer nodes are here than were asked for" if plan.displaced else ""
        self._records[name] = record
        if adopts:
            text = f"goes on with {model}, which the last head placed"
            self._add("adopted", text, record)
        return record

    def _note_ready(self, record: LoadedPlacement, *, first: bool, adopts: bool) -> None:
        model, now = record.card.id, self._clock()
        self._note_chips(model)
        self.forget_failed(model)
        record.step = record.error = ""
        self._observations.proven.add(model)
        was_proven, record.proven = record.proven, True
        if moves := record.moves(self._facts.name):
            record.moved = moves
        lost_at, record.lost_at = record.lost_at, None
        if adopts:
            return
        if lost_at is not None:
            seconds = now - lost_at
            where = moves or f"on {record.where(self._facts.name)}, as before"
            text = f"{model} answers again after {seconds:.2f} s: {where}"
            self._add("replanned", text, record, seconds=round(seconds, 3))
        elif first or not was_proven or not record.moved:
            seconds = now - record.begun_at
            text = f"placed {model} in {seconds:.1f} s: {first_clause(record.plan.reason)}"
            self._add("placed", text, record, seconds=round(seconds, 3))

    def _note_moved(self, record: LoadedPlacement) -> None:
        """A stage was loaded on another node and connected in place of the former one."""
        record.step, record.moved = "", record.moves(self._facts.name)
        where = record.moved or f"on {record.where(self._facts.name)}, as planned"
        self._add("replanned", f"{record.card.id} changed over: {where}", record)

    def _end(self, record: LoadedPlacement) -> None:
        """Its last runner is gone. A failed or lost one of a model without another stays."""
        self._ended.set()
        model, is_replaced = record.card.id, record.id in self._observations.retiring
        del self._records[record.id]
        if record.is_unloaded:
            self._add("unloaded", f"unloaded {model}", record)
        if any(not other.is_former for other in self.of_model(model)):
            return
        if record.lost_at is not None or record.error or not record.is_unloaded:
            self.forget_failed(model)
            record.is_former = True
            self._records[record.id] = record
        elif not is_replaced:
            self._observations.proven.discard(model)

    def _note_pause(self, here: Situation, desired: Desired) -> None:
        """Records an event if backoff delays a load."""
        records = self.of_model(desired.model)
        record = next((each for each in records if each.is_former), next(iter(records), None))
        current = here.current(desired)
        loads = current is not None and not current.missing
        if record is None or record.status in ("ready", "failed") or loads:
            return
        failures = here.failures(desired, "loss", "load")
        missing = None if record.placement is None else record.placement.missing
        pause_s = here.pause_s(desired, missing)
        if not failures or here.now >= failures[-1].at + pause_s:
            return
        reason = failures[-1].error.message
        record.step = f"{reason}; loaded again in {pause_s:.0f} s, after losses in a row"
        if record.pause_since != failures[-1].at:
            record.pause_since = failures[-1].at
            self._add("stage_lost", f"{record.card.id}: {record.step}", record)

    def _note_superseded(self, here: Situation, desired: Desired) -> None:
        current = here.current(desired)
        for record in self.of_model(desired.model):
            other = record.placement
            if current is None or other is None or record.id == current.id:
                continue
            adopted = all(runner.adopted for runner in other.runners)
            if record.is_superseded or not adopted or record.id in self._observations.retiring:
                continue
            record.is_superseded = True
            text = f"{desired.model} was placed at a head that is none now, and "
            text += "this one has a placement of its own; answers on it run to their end"
            self._add("superseded", text, record)

    def _note_chips(self, model: ModelId) -> None:
        view = self._facts.view(model)
        self._chips.update({node.id: f"{node.backend} {node.chip}" for node in view.nodes})

    def clear(self) -> None:
        """Another node leads."""
        self._records.clear()
        self._ended.set()

    def _add(self, kind: Kind, text: str, record: LoadedPlacement, **facts: Fact) -> None:
        _ = self._events.add(kind, text, model=record.card.id, placement=record.id, **facts)
