"""The head's memory between two passes: runners, failures, and the marks of its actions."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf

from ...placement.errors import ExoNodeError, LoadFailed
from ...placement.ids import ModelId, PlacementId
from ..machine.timing import PlacementTiming
from .runner_table import RunnerTable
from .state import Epoch, Failure, FailureKind, GiveUp, Node, Observed, Runner


class Observations:
    """All of it is read again from runners, or forgotten without harm, when the head changes."""

    def __init__(self, clock: Callable[[], float], timing: PlacementTiming) -> None:
        self._clock = clock
        self._timing = timing
        self._failures: list[Failure] = []
        self._answered_at: dict[ModelId, float] = {}
        self._serial = 0
        self.runners = RunnerTable(timing.stage_grace_s)
        self.broken: dict[PlacementId, Epoch] = {}
        self.retiring: dict[PlacementId, float] = {}
        self.given_up: dict[ModelId, GiveUp] = {}
        self.proven: set[ModelId] = set()
        """Models that were ready, and were not unloaded since."""

    def observed(
        self,
        nodes: Sequence[Node],
        waiting: Mapping[ModelId, float],
        answers: frozenset[tuple[PlacementId, Epoch]],
        busy: frozenset[PlacementId],
    ) -> Observed:
        """The whole for a pass; what is out of date is dropped first."""
        since = self._clock() - self._timing.failures_within_s
        self._failures = [failure for failure in self._failures if failure.at > since]
        names = {runner.key.placement for runner in self.runners.all}
        for marks in (self.retiring, self.broken):
            for name in marks.keys() - names:
                del marks[name]
        return Observed(
            tuple(nodes),
            self.runners.all,
            dict(waiting),
            answers,
            dict(self.broken),
            tuple(self._failures),
            dict(self._answered_at),
            frozenset(self.proven),
            dict(self.retiring),
            dict(self.given_up),
            busy,
            self._serial,
        )

    def count(self) -> None:
        """One more name or epoch was used."""
        self._serial += 1

    def fail(
        self, runner: Runner, kind: FailureKind, error: ExoNodeError, *, covered: bool = False
    ) -> None:
        node, placement, stage = runner.key
        now, model = self._clock(), runner.plan.model
        self._failures.append(Failure(model, node, kind, now, placement, stage, error, covered))

    def failed_spares(self, placement: PlacementId) -> dict[int, Failure]:
        """The last failure by stage."""
        spares = (f for f in self._failures if f.kind == "spare" and f.placement == placement)
        return {failure.stage: failure for failure in spares}

    def forget_failures(self, model: ModelId) -> None:
        """It works, or a person requested it."""
        self._answered_at[model] = self._clock()
        _ = self.given_up.pop(model, None)

    def refusal(self, model: ModelId) -> LoadFailed | None:
        """The error for a request during the pause of a model that was never ready."""
        mark = self.given_up.get(model)
        if mark is None or mark.no_room or model in self.proven or mark.until <= self._clock():
            return None
        since = self._answered_at.get(model, -inf)
        loads = (f for f in self._failures if f.model == model and f.kind in ("load", "files"))
        times = sum(failure.at > since for failure in loads)
        wait_s = ceil(mark.until - self._clock())
        text = f"{model} could not be loaded {times} times in a row: {mark.error.message}. "
        text += f"A request in {wait_s} s tries it again, `POST /v1/placements` at once"
        return LoadFailed(text, param="model")

    def clear(self) -> None:
        """Another node leads."""
        self.runners.clear()
        self._failures.clear()
        for marks in (self.broken, self.retiring, self.given_up, self.proven, self._answered_at):
            marks.clear()
