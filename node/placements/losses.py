"""Runners that ended, hang, or went with their nodes: noted for the next pass."""

from collections.abc import Callable, Iterable

from ...placement.errors import ExoNodeError, PeerLost
from ...placement.ids import NodeId, PlacementId
from .loaded_placement import LoadedPlacement
from .observations import Observations
from .placement_records import PlacementRecords
from .stage_actions import StageActions
from .state import UNCONNECTED, Epoch, FailureKind, Runner


class Losses:
    """Notes each loss that the head learns of; `changed` asks for a pass."""

    def __init__(
        self,
        observations: Observations,
        records: PlacementRecords,
        actions: StageActions,
        changed: Callable[[], None],
    ) -> None:
        self._observations = observations
        self._records = records
        self._actions = actions
        self._changed = changed

    def broke(
        self, placement: PlacementId, epoch: Epoch, why: str, lost_stages: Iterable[int] = ()
    ) -> None:
        """An answer of that epoch was lost. `lost_stages` did not answer it."""
        record = self._records.get(placement)
        if record is None or record.placement is None or epoch != record.epoch:
            return
        owners = record.owners

        def silence(runners: list[Runner]) -> None:
            for runner in runners:
                self._silence(runner, why)
            if not runners:
                self._observations.broken[placement] = epoch

        if silent := [owners[stage] for stage in lost_stages if stage in owners]:
            silence(silent)
        else:
            self._actions.probe(list(owners.values()), silence)

    def runner(self, node: NodeId, placement: str, stage: int, why: str) -> None:
        """The runner of a stage on that node ended."""
        for runner in self._observations.runners.all:
            if runner.key == (node, placement, stage) and runner.state == "ready":
                self.end(runner, why)

    def node(self, node: NodeId, why: str) -> None:
        """All runners on that node are gone."""
        for runner in self._observations.runners.remove_node(node):
            if runner.state == "ready":
                self._records.note_loss(runner, why)
            if runner.state != "stopping":
                self._observations.fail(runner, "gone", PeerLost(why))
        self._changed()

    def end(self, runner: Runner, why: str) -> None:
        """A ready runner ended; one that was found silent before is counted already."""
        if not runner.silent:
            self._records.note_loss(runner, why)
            self.failed(runner, "loss", PeerLost(why))
        _ = self._observations.runners.remove(runner.key)
        self._changed()

    def failed(self, runner: Runner, kind: FailureKind, error: ExoNodeError) -> None:
        """A loss counts as one of the model's if its runner owned the stage."""
        record = self._records.get(runner.key.placement)
        owner = None if record is None else record.owners.get(runner.key.stage)
        if kind == "loss" and owner is not None and owner.key != runner.key:
            return
        covered = record is not None and any(
            spare.stage == runner.key.stage and spare.status == "ready" for spare in record.spares
        )
        self._observations.fail(runner, kind, error, covered=covered)

    def look_over(self, record: LoadedPlacement) -> None:
        """Pings the runners of a placement that the last head loaded."""

        def pinged(silent: list[Runner]) -> None:
            for runner in silent:
                self._silence(runner, f"stage {runner.key.stage} was lost with the last head")

        owners = [runner for runner in record.owners.values() if runner.epoch != UNCONNECTED]
        if owners:
            self._actions.probe(owners, pinged)

    def _silence(self, runner: Runner, why: str) -> None:
        self._records.note_loss(runner, why)
        self.failed(runner, "loss", PeerLost(why))
        self._observations.runners.change(runner.key, silent=True)
        self._changed()
