"""What follows when a placement loses stages: restored, or failed; and what is said."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from ...placement.errors import ExoNodeError, LoadFailed, PeerLost
from ...placement.ids import NodeId
from ..machine.events import EventLog, Fact, Kind
from ..machine.log import apart
from .loaded_placement import LoadedPlacement
from .restart_backoff import TRIES, RestartBackoff
from .stage_recovery import StageRecovery
from .stages import Facts


class Failover:
    """Has one task for each placement that is restored; runs on the node's event loop."""

    def __init__(
        self,
        recovery: StageRecovery,
        facts: Facts,
        failures: RestartBackoff,
        events: EventLog,
        changed: Callable[[], None],
        fill: Callable[[LoadedPlacement], None],
    ) -> None:
        """`changed` is called once a placement is restored.

        `fill` loads what spares it lacks then.
        """
        self._recovery = recovery
        self._facts = facts
        self._failures = failures
        self._events = events
        self._changed = changed
        self._fill = fill

    def broke(
        self, record: LoadedPlacement, connections: int, why: str, gone: Iterable[int]
    ) -> None:
        """An attempt failed that began when the stages had been connected so many times."""
        if record.connections <= connections:
            record.gone.update(stage for stage in gone if stage in range(len(record.endpoints)))
            self.lost(record, None, why)

    def silent(self, record: LoadedPlacement, stages: Sequence[int]) -> None:
        """Stages of an adopted placement do not answer."""
        record.gone.update(stages)
        self.lost(record, None, f"stage {stages[0]} was lost with the last head")

    def lost(
        self, record: LoadedPlacement, stage: int | None, why: str, *, planned: bool = False
    ) -> None:
        """A stage is gone, or (None) some stage may be: the placement is restored.

        Requests that used it go on on what is restored; see `chat`. A `planned` loss is no failure.
        """
        if record.status not in ("ready", "loading", "restoring"):
            return
        if stage is not None:
            record.gone.add(stage)
        if record.status == "loading":
            record.load.lose(why)
        elif record.restoring is None:
            text = f"{record.id} of {record.card.id} lost a stage: {why}"
            self._add("stage_lost", text, record, stage=stage)
            record.load.lose(why)
            restore = self._restore(record, planned=planned)
            record.restoring = asyncio.create_task(restore, context=apart())

    def lost_on(
        self, record: LoadedPlacement, node: NodeId, why: str, stage: int | None = None
    ) -> None:
        """Runners on that node are gone: of `stage`, or all; stages' own and spares."""
        spares = [s for s in record.spares if s.node == node and stage in (None, s.stage)]
        for spare in spares:
            record.spares.remove(spare)
        for number, endpoint in enumerate(record.endpoints):
            if endpoint.node == node and stage in (None, number):
                self.lost(record, number, why)
        if spares and record.status == "ready":
            self._fill(record)

    async def _restore(self, record: LoadedPlacement, *, planned: bool) -> None:
        try:
            begun, why, before = time.monotonic(), record.load.error, record.stages
            if not planned:
                await self._pause(record)
            replaced = await self._replaced(record, planned=planned)
            record.load.ready()
            self._changed()
            self._tell_restored(record, replaced, time.monotonic() - begun, why)
            if record.stages != before:
                names = {node.id: node.name for node in self._facts.view(record.card.id).nodes}
                moved = record.moves(names)
                record.note_move(f"since then {moved} ({why})" if moved else "")
        except ExoNodeError as fault:
            # Not as it was: the next request plans anew, with what is left.
            text = f"{record.id} of {record.card.id} cannot be restored: {fault.message}"
            self._add("load_failed", text, record)
            record.load.fail(fault.message)
            await self._recovery.unload(record)
        finally:
            record.restoring = None
        if record.status == "ready":
            self._fill(record)

    async def _replaced(self, record: LoadedPlacement, *, planned: bool) -> list[int]:
        """As `StageRecovery.restore`; a stage that is lost while it loads is lost once more."""
        while True:
            try:
                return await self._recovery.restore(record, planned=planned)
            except (LoadFailed, PeerLost) as fault:
                counts = [self._failures.count(record.card.id, stage) for stage in record.gone]
                if max(counts, default=TRIES) >= TRIES:
                    raise
                record.load.lose(fault.message)
                await self._pause(record)

    async def _pause(self, record: LoadedPlacement) -> None:
        """Notes the failure and waits as long as those of the same stages before it ask for."""
        model, recovery = record.card.id, self._recovery
        record.gone.update(await recovery.lost_stages(record))
        at_once = recovery.has_spares(record, record.gone)
        stages: Collection[int | None] = record.gone or (None,)
        for stage in stages:
            self._failures.note(model, stage, covered=at_once and stage is not None)
        pause_s = 0.0 if at_once else self._failures.pause_s(model, stages)
        if pause_s > 0:
            text = f"{record.load.error}; loaded again in {pause_s:.0f} s, after losses in a row"
            record.load.advance(text)
            self._add("stage_lost", f"{record.id} of {model}: {text}", record)
        await asyncio.sleep(pause_s)

    def _tell_restored(
        self, record: LoadedPlacement, replaced: Sequence[int], seconds: float, why: str
    ) -> None:
        nodes = (
            ", ".join(f"stage {i} on {record.endpoints[i].node}" for i in replaced)
            or "the same runners, connected anew"
        )
        text = f"{record.id} of {record.card.id} goes on after {seconds:.2f} s: {nodes} ({why})"
        self._add("replanned", text, record, seconds=round(seconds, 3))

    def _add(self, kind: Kind, text: str, record: LoadedPlacement, **facts: Fact) -> None:
        _ = self._events.add(kind, text, model=record.card.id, placement=record.id, **facts)
