"""The head's memory between two passes: runners, failures, and the marks of its actions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import ceil, inf

from ...placement.errors import ExoNodeError, LoadFailed, PeerLost
from ...placement.ids import ModelId, NodeId, PlacementId
from ...proto import peer_pb2 as pb
from ..machine.timing import Timing
from .loaded_placement import epoch_from_wire
from .plan_wire import plan_from_wire
from .situation import placement_of
from .state import (
    UNCONNECTED,
    Epoch,
    FailureKind,
    GiveUp,
    LiveNode,
    Observed,
    RunnerFailure,
    RunnerKey,
    StageRunner,
)

STAGE_HEADROOM = 1.2
"""A runner's memory over the weights and caches that it reports."""


_LOADS = ("load", "files", "unreached")


class Observations:
    """Runners as own actions say, corrected by what nodes report of theirs; and what went wrong.

    An own action counts until a report can know of it: what a node has just loaded or unloaded is
    not undone by a heartbeat that it sent before. All of it is read again from runners, or
    forgotten without harm, when the head changes.
    """

    def __init__(self, clock: Callable[[], float], timing: Timing) -> None:
        self._clock = clock
        self._timing = timing
        self._runners: dict[RunnerKey, StageRunner] = {}
        self._missing_since: dict[RunnerKey, float] = {}
        self._removed_at: dict[RunnerKey, float] = {}
        """A report that is older does not bring a runner back."""
        self.failures: list[RunnerFailure] = []
        self._answered_at: dict[ModelId, float] = {}
        self._serial = 0
        self.broken: dict[PlacementId, Epoch] = {}
        self.retiring: dict[PlacementId, float] = {}
        self.given_up: dict[ModelId, GiveUp] = {}
        self.proven: set[ModelId] = set()
        """Models that were ready, and were not unloaded since."""

    def observed(self) -> Observed:
        """This memory for a pass, without the rest; what is out of date is dropped first."""
        since = self._clock() - self._timing.failures_within_s
        self.failures = [failure for failure in self.failures if failure.at > since]
        self._removed_at = {key: at for key, at in self._removed_at.items() if at > since}
        names = {runner.key.placement for runner in self.runners}
        for marks in (self.retiring, self.broken):
            for name in marks.keys() - names:
                del marks[name]
        return Observed(
            runners=self.runners,
            broken=dict(self.broken),
            failures=tuple(self.failures),
            answered_at=dict(self._answered_at),
            proven=frozenset(self.proven),
            retiring=dict(self.retiring),
            given_up=dict(self.given_up),
            serial=self._serial,
        )

    def count(self) -> None:
        """One more name or epoch was used."""
        self._serial += 1

    def clear(self) -> None:
        """Another node leads."""
        self.failures.clear()
        for table in (self._runners, self._missing_since, self._removed_at, self._answered_at):
            table.clear()
        for marks in (self.broken, self.retiring, self.given_up, self.proven):
            marks.clear()

    @property
    def runners(self) -> tuple[StageRunner, ...]:
        """All runners, each from the request to load it until it is gone."""
        return tuple(self._runners.values())

    def get(self, key: RunnerKey) -> StageRunner | None:
        return self._runners.get(key)

    def add(self, runner: StageRunner) -> None:
        self._runners[runner.key] = runner
        _ = self._missing_since.pop(runner.key, None)

    def change(self, key: RunnerKey, **fields: object) -> None:
        """Does nothing where there is no such runner."""
        if (runner := self._runners.get(key)) is not None:
            self._runners[key] = replace(runner, **fields)  # pyright: ignore[reportArgumentType]

    def remove(self, key: RunnerKey) -> None:
        _ = self._missing_since.pop(key, None)
        if self._runners.pop(key, None) is not None:
            self._removed_at[key] = self._clock()

    def merge(self, nodes: Iterable[LiveNode]) -> None:
        """Takes over what nodes report; ready runners that are missing there have ended."""
        now = self._clock()
        for node in nodes:
            if node.stages is None:
                continue
            keys: set[RunnerKey] = set()
            for state in node.stages:
                key = RunnerKey(node.id, PlacementId(state.placement), state.stage)
                keys.add(key)
                if node.heard_at > self._removed_at.get(key, -inf):
                    self._take(key, state, now)
            # What this node reports of itself is as it is now.
            grace_s = 0.0 if node.heard_at == inf else self._timing.patience_s
            for runner in self.runners:
                expected = runner.state == "ready" or (runner.adopted and runner.state == "loading")
                if runner.key.node != node.id or runner.key in keys or not expected:
                    continue
                if now - self._missing_since.setdefault(runner.key, now) >= grace_s:
                    self.end(runner, "its runner ended on the other node")

    def _take(self, key: RunnerKey, state: pb.StageState, now: float) -> None:
        _ = self._missing_since.pop(key, None)
        runner = self._runners.get(key) or _adopted(key, state, now)
        if runner is None:
            return
        used = int((state.weight_bytes + state.cache_bytes) * STAGE_HEADROOM)
        if runner.adopted and runner.state == "loading" and state.HasField("ready"):
            runner = replace(runner, state="ready", ready=state.ready)
        epoch = runner.epoch
        same = runner.ready is not None and runner.ready.pid == state.ready.pid
        if same and state.HasField("epoch"):  # else it is of a runner that was ended
            epoch = max(epoch, epoch_from_wire(state.epoch))
        self._runners[key] = replace(
            runner, epoch=epoch, requests=state.live_requests, used_memory=used
        )

    def fail(self, runner: StageRunner, kind: FailureKind, error: ExoNodeError) -> None:
        """A loss counts as one of the model's if the runner owned its stage. One that was loaded to
        take over and cannot be called counts against its node."""
        node, name, stage = runner.key
        siblings = [
            each
            for each in self.runners
            if each.key.placement == name and each.state != "stopping" and not each.silent
        ]
        placement = placement_of(name, siblings) if siblings else None
        owner = None if placement is None else placement.owners.get(stage)
        if kind in ("loss", "unreached") and owner is not None and owner.key != runner.key:
            if kind == "loss":
                return
            kind = "node"
        if runner.is_reader and kind != "gone":
            kind = "extra"  # no answer depends on it
        failure = RunnerFailure(runner.plan.model, node, kind, self._clock(), name, stage, error)
        self.failures.append(failure)

    def end(self, runner: StageRunner, why: str) -> None:
        """A ready runner ended; one that was found silent before is counted already."""
        if runner.state == "ready" and not runner.silent:
            self.fail(runner, "loss", PeerLost(why))
        self.remove(runner.key)

    def end_node(self, node: NodeId, why: str) -> None:
        """All runners on that node are gone."""
        lost = [runner for runner in self.runners if runner.key.node == node]
        for runner in lost:
            if runner.state != "stopping":
                self.fail(runner, "gone", PeerLost(why))
        for runner in lost:
            self.remove(runner.key)

    def silence(self, runner: StageRunner, why: str) -> None:
        """It does not answer, for instance because nothing reaches its machine."""
        if runner.epoch != UNCONNECTED or runner.adopted:
            self.fail(runner, "loss", PeerLost(why))
        else:
            self.fail(runner, "unreached", _unreached(runner, why))
        self.change(runner.key, silent=True)

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
        loads = (f for f in self.failures if f.model == model and f.kind in _LOADS)
        times = sum(failure.at > since for failure in loads)
        wait_s = ceil(mark.until - self._clock())
        text = f"{model} could not be loaded {times} times in a row: {mark.error.message}. "
        text += f"A request in {wait_s} s tries it again, `POST /v1/placements` at once"
        return LoadFailed(text, param="model")


def _unreached(runner: StageRunner, why: str) -> LoadFailed:
    node, _, stage = runner.key
    return LoadFailed(
        f"stage {stage} was loaded on {node}, but the head cannot call it there ({why}). Check "
        "that no firewall stands between",
        param="model",
    )


def _adopted(key: RunnerKey, state: pb.StageState, now: float) -> StageRunner | None:
    """A runner that another head loaded, or None where it reports too little of its placement."""
    if state.status == "failed" or (plan := plan_from_wire(state.spec)) is None:
        return None
    ready = state.ready if state.HasField("ready") else None
    status = "loading" if ready is None else "ready"
    return StageRunner(key, plan, status, now, adopted=True, ready=ready, spec=state.spec)


def promised(runners: Iterable[StageRunner]) -> Mapping[NodeId, Mapping[ModelId, int]]:
    """Bytes that runners may take, by node and model, wherever they are or are being loaded."""
    promises: dict[NodeId, dict[ModelId, int]] = {}
    for runner in runners:
        of_node = promises.setdefault(runner.key.node, {})
        size = runner.plan.promised(runner.key.stage)
        of_node[runner.plan.model] = of_node.get(runner.plan.model, 0) + size
    return promises
