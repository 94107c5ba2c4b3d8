"""The observed state as the reconciler reads it: placements, their use, their failures. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from ...placement.ids import ModelId, NodeId, PlacementId
from ..cluster.desired import Desired
from .state import (
    UNCONNECTED,
    Action,
    Epoch,
    FailureKind,
    Load,
    Observed,
    PlanningView,
    Replan,
    RunnerFailure,
    RunnerKey,
    StagedPlan,
    StageRunner,
    Unload,
)

TRIES = 4
"""Loads that fail in a row before waiting requests are answered with the error."""


@dataclass(frozen=True)
class ObservedPlacement:
    """One placement as observed: the runner that owns each stage, and others of the same name."""

    id: PlacementId
    plan: StagedPlan
    owners: Mapping[int, StageRunner]
    others: tuple[StageRunner, ...]

    @property
    def runners(self) -> tuple[StageRunner, ...]:
        return (*self.owners.values(), *self.others)

    @property
    def missing(self) -> list[int]:
        return [stage for stage in range(len(self.plan)) if stage not in self.owners]

    @cached_property
    def ready(self) -> bool:
        return not self.missing and all(r.state == "ready" for r in self.owners.values())

    @property
    def epoch(self) -> Epoch:
        """The stages' last connection."""
        return max((r.epoch for r in self.owners.values()), default=UNCONNECTED)

    @cached_property
    def connected(self) -> bool:
        """Every stage is ready, and all were connected together."""
        epochs = {runner.epoch for runner in self.owners.values()}
        return self.ready and len(epochs) == 1 and epochs != {UNCONNECTED}

    @property
    def nodes(self) -> list[NodeId]:
        return [self.owners[stage].key.node for stage in sorted(self.owners)]

    @property
    def displaced(self) -> bool:
        """Not where the planner wanted it, or planned while nodes were missing."""
        moved = any(r.key.node != self.plan.nodes[s] for s, r in self.owners.items())
        return moved or self.plan.displaced

    @property
    def crowded(self) -> list[int]:
        """Stages that were moved to a node with another one: its loss takes both."""
        nodes = self.nodes
        return [
            stage
            for stage, runner in sorted(self.owners.items())
            if nodes.count(runner.key.node) > 1 and runner.key.node != self.plan.nodes[stage]
        ]

    @property
    def since(self) -> float:
        """When this head first knew one of its runners."""
        return min((r.since for r in self.runners), default=inf)

    @property
    def loaded_at(self) -> float:
        return max((r.since for r in self.owners.values()), default=-inf)

    def successors(self, stage: int, draining: Iterable[NodeId] = ()) -> list[StageRunner]:
        """Runners that were never connected and may take the stage's place."""
        return [
            runner
            for runner in self.others
            if runner.key.stage == stage
            and runner.epoch == UNCONNECTED
            and runner.key.node not in draining
        ]


def placement_of(
    name: PlacementId, runners: Sequence[StageRunner], draining: Iterable[NodeId] = ()
) -> ObservedPlacement:
    """Chooses the owner of each stage. Of two, the one in a complete and later epoch owns it.

    Stages on draining nodes change over together, so that answers are interrupted once.
    """
    plan = runners[0].plan
    complete = max(complete_epochs(runners), default=None)
    ordered = sorted(runners, key=lambda runner: (runner.since, runner.key))

    def rank(runner: StageRunner) -> tuple[bool, bool, Epoch, bool]:
        stays = runner.key.node not in draining
        return runner.epoch == complete, runner.state == "ready", runner.epoch, stays

    owners: dict[int, StageRunner] = {}
    for stage in range(len(plan)):
        candidates = [runner for runner in ordered if runner.key.stage == stage]
        if candidates:
            owners[stage] = max(candidates, key=rank)
    leaving = {stage for stage, runner in owners.items() if runner.key.node in draining}
    incoming = {
        runner.key.stage: runner
        for runner in reversed(ordered)
        if runner.key.stage in leaving
        and runner.key.node not in draining
        and runner.state == "ready"
    }
    if incoming.keys() == leaving:
        owners |= incoming
    owned = {runner.key for runner in owners.values()}
    return ObservedPlacement(name, plan, owners, tuple(r for r in ordered if r.key not in owned))


def complete_epochs(runners: Iterable[StageRunner]) -> set[Epoch]:
    """The epochs of one placement in which every stage has a ready runner."""
    stages: dict[Epoch, set[int]] = {}
    count = 0
    for runner in runners:
        count = len(runner.plan)
        if runner.state == "ready" and runner.epoch != UNCONNECTED:
            stages.setdefault(runner.epoch, set()).add(runner.key.stage)
    return {epoch for epoch, each in stages.items() if len(each) == count}


class Situation:
    """One call of `reconcile`. `free`, `unloaded`, `retiring` change as actions are chosen."""

    def __init__(
        self, desired: Sequence[Desired], observed: Observed, view: PlanningView, now: float
    ) -> None:
        self.observed, self.view, self.now, self.timing = observed, view, now, view.timing
        self.actions: list[Action] = []
        self.unloaded: set[RunnerKey] = set()
        self.serial = observed.serial
        self.retiring = dict(observed.retiring)
        self.nodes = {node.id: node for node in observed.nodes}
        self.live = self.nodes.keys()
        self.draining = {node.id for node in observed.nodes if node.draining}
        usable = self.live - self.draining
        self.free = {node: unused for node, unused in observed.ledger().items() if node in usable}
        self.placements: dict[ModelId, list[ObservedPlacement]] = {
            each.model: [] for each in desired
        }
        groups: dict[PlacementId, list[StageRunner]] = {}
        for runner in observed.runners:
            if self.is_healthy(runner):
                groups.setdefault(runner.key.placement, []).append(runner)
        for name in sorted(groups):
            placement = placement_of(name, groups[name], self.draining)
            self.placements.setdefault(placement.plan.model, []).append(placement)
        self.desired = [*desired, *self._leftovers(desired)]
        self.desired.sort(key=self._priority)

    def _leftovers(self, desired: Sequence[Desired]) -> list[Desired]:
        """Models that nothing desires any more: their answers end, and then they go."""
        models = {each.model for each in desired}
        return [
            Desired(model, placements[0].plan.options, keep_alive_s=0.0, removed=True)
            for model, placements in self.placements.items()
            if model not in models
        ]

    def _priority(self, desired: Desired) -> tuple[float, bool, ModelId]:
        """Models that requests wait for first, the longest wait first."""
        since = self.observed.waiting.get(desired.model, inf)
        return since, not desired.requested, desired.model

    def is_healthy(self, runner: StageRunner) -> bool:
        return runner.key.node in self.live and runner.state != "stopping" and not runner.silent

    def is_wanted(self, desired: Desired) -> bool:
        """In use, waited for, or within its keep_alive."""
        if desired.model in self.observed.waiting:
            return True
        if any(self.is_used(placement) for placement in self.placements[desired.model]):
            return True
        stay_s = max(desired.stay_s, self.timing.claim_grace_s)
        return self.now - desired.used_at < stay_s

    def is_used(self, placement: ObservedPlacement) -> bool:
        """Answers run on it, in whichever of its epochs."""
        return any(name == placement.id for name, _ in self.observed.answers) or any(
            runner.requests for runner in placement.runners
        )

    def idle_s(self, desired: Desired, placement: ObservedPlacement) -> float:
        """Seconds since the placement was loaded or its model used; 0 while answers run on it."""
        used_at = max(placement.loaded_at, desired.used_at)
        return 0.0 if self.is_used(placement) else self.now - used_at

    def answers_on(self, placement: ObservedPlacement) -> int:
        answers = self.observed.answers.items()
        return sum(count for (name, _), count in answers if name == placement.id)

    def in_use(self, runner: StageRunner, placement: ObservedPlacement) -> bool:
        """An answer runs in the epoch that this runner is connected in."""
        if runner.epoch not in complete_epochs(placement.runners):
            return False
        peers = (other for other in placement.runners if other.epoch == runner.epoch)
        claimed = (placement.id, runner.epoch) in self.observed.answers
        return claimed or any(other.requests for other in peers)

    def current(self, desired: Desired) -> ObservedPlacement | None:
        """The first of `replicas`."""
        return next(iter(self.replicas(desired)), None)

    def replicas(self, desired: Desired) -> list[ObservedPlacement]:
        """The placements that stay: connected ones before others, the longest known first."""
        candidates = [
            placement
            for placement in self.placements[desired.model]
            if placement.id not in self.retiring
            and placement.owners
            and self.unloaded.isdisjoint(r.key for r in placement.owners.values())
        ]
        return sorted(candidates, key=_order)[: desired.replicas]

    def is_stale(self, placement: ObservedPlacement, desired: Desired) -> bool:
        """It was planned for other bounds than are desired now."""
        plan = placement.plan
        return plan.options != desired.options and not desired.removed

    def is_requested_since(self, desired: Desired, placement: ObservedPlacement) -> bool:
        """Whether a person requested the model after the placement's last load.

        What another head loaded, this one may first learn of after a request of its own.
        """
        own = [runner.since for runner in placement.owners.values() if not runner.adopted]
        if own:
            return desired.requested_at > max(own)
        return desired.requested_at >= self.view.leads_since

    def failures(self, desired: Desired, *kinds: FailureKind) -> list[RunnerFailure]:
        """The recent failures, of these kinds or of any, since the last good answer and the last
        explicit request."""
        since = max(
            self.observed.answered_at.get(desired.model, -inf),
            desired.requested_at,
            self.now - self.timing.failures_within_s,
        )
        own = (f for f in self.observed.failures if f.model == desired.model and f.at > since)
        return [f for f in own if not kinds or f.kind in kinds]

    def pause_s(
        self, desired: Desired, stages: Iterable[int] | None = None, node: NodeId | None = None
    ) -> float:
        """Seconds between the last failure and the next load: none after the first failure, then
        1, 2, 4, … for the stage that failed most often, of `stages` on `node` if these are given.
        """
        lost = self.failures(desired, "loss", "unreached", "load")
        failures = [f for f in lost if node in (None, f.node)]
        numbers = {f.stage for f in failures} if stages is None else set(stages)
        counts = [sum(f.stage == number for f in failures) for number in numbers]
        most = max(counts, default=0)
        return 0.0 if most < 2 else min(self.timing.max_pause_s, 2.0 ** (most - 2))

    def paused(self, desired: Desired) -> set[NodeId]:
        """Nodes that failed this model, each of which has a pause of its own."""
        last = {f.node: f.at for f in self.failures(desired, "loss", "unreached", "load")}
        return {n for n, at in last.items() if self.now < at + self.pause_s(desired, node=n)}

    def avoided(self, desired: Desired) -> set[NodeId]:
        """Nodes that failed this model: one that was never ready at once, else the second time."""
        nodes = [f.node for f in self.failures(desired, "load", "files")]
        least = 2 if desired.model in self.observed.proven else 1
        unreached = [f.node for f in self.failures(desired, "unreached")]
        return {node for node in nodes if nodes.count(node) >= least} | {
            node for node in unreached if unreached.count(node) >= 2
        }

    def doubtful(self) -> set[NodeId]:
        """Nodes that did not answer a moment ago and may still count as alive.

        One that went and came back since is none of them.
        """
        return {
            f.node
            for f in self.observed.failures
            if f.kind == "node"
            and self.now - f.at < self.timing.refill_every_s
            and not (f.node in self.nodes and self.nodes[f.node].alive_since > f.at)
        }

    def is_steady(self, node: NodeId) -> bool:
        """Whether the node has been well for long enough to move a stage to it unasked: ten
        seconds after its first failure, then 20, 40, …, so that none wanders with a flapping one.
        """
        times = sorted(f.at for f in self.observed.failures if f.node == node)
        gap_s = self.timing.refill_every_s
        count = sum(later - at >= gap_s for at, later in pairwise([-inf, *times]))
        pause_s = min(self.timing.settle_after_s, gap_s * 2.0 ** max(0, count - 1))
        return self.now - max(self.nodes[node].alive_since, *times[-1:], -inf) >= pause_s

    def ending(self) -> list[StageRunner]:
        """Runners whose memory is about to be free."""
        return [r for r in self.observed.runners if r.state == "stopping" or r.key in self.unloaded]

    def without(
        self, free: Mapping[NodeId, int], runners: Iterable[StageRunner]
    ) -> dict[NodeId, int]:
        """`free` as it will be once these runners are gone."""
        later = dict(free)
        for runner in runners:
            if runner.key.node in later:
                later[runner.key.node] += runner.memory
        return later

    def reserve(self, plan: StagedPlan) -> None:
        for node, size in zip(plan.nodes, plan.memory, strict=True):
            self.free[node] = self.free.get(node, 0) - size

    def place(self, plan: StagedPlan, *, extra: bool = False) -> None:
        """Loads all stages of a new placement. `extra`: no answer waits for it."""
        self.serial += 1
        name = self.view.name(self.serial)
        for stage, node in enumerate(plan.nodes):
            self.load(Load(RunnerKey(node, name, stage), plan, extra))

    def load(self, action: Load) -> None:
        self.free[action.key.node] -= action.plan.promised(action.key.stage)
        self.actions.append(action)

    def unload(self, runner: StageRunner, why: str, *, kill: bool = False) -> None:
        if runner.key not in self.unloaded and runner.state != "stopping":
            self.unloaded.add(runner.key)
            self.actions.append(Unload(runner.key, why, kill))

    def replan(self, placement: ObservedPlacement, why: str) -> None:
        if placement.id not in self.retiring:
            self.retiring[placement.id] = self.now
            self.actions.append(Replan(placement.id, placement.plan.model, why))


def _order(placement: ObservedPlacement) -> tuple[bool, float, float, PlacementId]:
    return not placement.connected, placement.since, placement.plan.plan.score, placement.id
