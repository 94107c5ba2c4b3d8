"""Losses of runners, as answers, this node's supervisor and the membership notice them."""

from collections.abc import Callable, Iterable

from ...placement.ids import NodeId, PlacementId
from .observations import Observations
from .placement_records import PlacementRecords
from .stage_actions import StageActions
from .state import Epoch, RunnerKey


class Losses:
    """Notes them for the next pass; `changed` is called after each."""

    def __init__(
        self,
        records: PlacementRecords,
        observations: Observations,
        actions: StageActions,
        changed: Callable[[], None],
    ) -> None:
        self._records = records
        self._observations = observations
        self._actions = actions
        self._changed = changed

    def note_broken(
        self, placement: PlacementId, epoch: Epoch, why: str, lost_stages: Iterable[int] = ()
    ) -> None:
        """An answer of that epoch was lost. `lost_stages` did not answer it."""
        record = self._records.get(placement)
        if record is None or record.placement is None or epoch != record.epoch:
            return
        owners = record.owners
        silent = [owners[stage] for stage in lost_stages if stage in owners]
        for runner in silent:
            self._observations.silence(runner, why)
        if silent:
            self._changed()
        else:
            self._actions.probe(list(owners.values()), why, broken=epoch)

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
