"""One placement as the rest of the node sees it: its plan, its runners, its answers."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Literal

from ...placement.card import ModelCard
from ...placement.cluster import StageAssignment
from ...placement.drafting import HeadState
from ...placement.ids import NodeId, PlacementId
from ...placement.options import PlanOptions
from ...placement.plan import Placement as NodePlan
from ...proto import peer_pb2 as pb
from ..runners.runner_client import Endpoint
from .situation import ObservedPlacement
from .state import UNCONNECTED, Demand, Epoch, StagedPlan, StageRunner

Status = Literal["loading", "ready", "restoring", "failed"]
CROWD = 2
"""Answers at once that share a placement's speed: another replica would serve them faster."""


@dataclass(slots=True)
class Activity:
    """The answers on a placement by epoch. Times are monotonic."""

    answers: Counter[Epoch] = field(default_factory=Counter[Epoch])
    given_at: list[float] = field(default_factory=list[float])
    """When it was given to answers that have not begun."""
    demand: Demand = field(default_factory=Demand)
    """The state at the last pass of the reconciler; `reading_until` at the last answer."""
    _crowded_at: float = -inf
    """When it last had CROWD answers at once."""

    @property
    def requests(self) -> int:
        return self.answers.total()

    def note(self, now: float, grace_s: float) -> None:
        """Updates `demand`. Answers that follow each other within `grace_s` leave no gap."""
        count = self.requests + len(self.given_at)
        if count >= CROWD:
            self._crowded_at = now
        is_crowded = now - self._crowded_at <= grace_s
        self.demand = replace(
            self.demand,
            crowded_since=min(self.demand.crowded_since, now) if is_crowded else inf,
            idle_since=inf if count else min(self.demand.idle_since, now),
        )

    def give(self, now: float, reading_s: float) -> None:
        """An answer is about to begin on it, whose prompt is expected to take that long."""
        self.given_at.append(now)
        until = max(now, self.demand.reading_until) + reading_s
        self.demand = replace(self.demand, reading_until=until)

    def begin(self, epoch: Epoch) -> None:
        """The runners of that epoch are not unloaded before `end`."""
        self.answers[epoch] += 1
        self.decline()

    def decline(self, reading_s: float = 0.0) -> None:
        """An answer that it was given to is not about to begin any more. `reading_s`: as given, if
        its prompt will not be read."""
        if self.given_at:
            _ = self.given_at.pop(0)
        until = self.demand.reading_until - reading_s
        self.demand = replace(self.demand, reading_until=until)

    def end(self, epoch: Epoch) -> None:
        self.answers[epoch] -= 1
        if not self.answers[epoch]:
            del self.answers[epoch]
        if not self.requests and not self.given_at:  # its prompts were read, sooner than expected
            self.demand = replace(self.demand, reading_until=-inf)


@dataclass(slots=True)
class LoadedPlacement:
    """A placement on its head: `placement` is derived from its runners after each pass."""

    id: Final[PlacementId]
    card: Final[ModelCard]
    staged: Final[StagedPlan]
    proven: bool = False
    """The model was ready before: clients wait for this load as for a restoration."""
    activity: Final[Activity] = field(default_factory=Activity)
    placement: ObservedPlacement | None = None
    """Its runners as they were seen last, or None if it has none."""
    chips: Mapping[NodeId, str] = field(default_factory=dict[NodeId, str])
    """Backend and chip by node: the numbers that MLX computes follow from them."""
    begun_at: float = field(default_factory=time.monotonic)
    lost_at: float | None = None
    """Since when a stage is missing, or None if none is."""
    why: str = ""
    """Why a stage is missing."""
    step: str = ""
    """The present step of its load, for a person."""
    error: str = ""
    """Why it failed; empty while it may still get ready."""
    moved: str = ""
    """Changes to the plan by losses, for a person."""
    is_former: bool = False
    """It has no runner left and is shown until another placement of its model is ready."""
    is_unloaded: bool = False
    """The reconciler unloads its runners: its end is no loss."""
    is_superseded: bool = False
    """Whether the event of it was added."""
    pause_since: float = -inf
    """The time of the failure that the last event about a pause names."""

    @property
    def plan(self) -> NodePlan:
        """The planner's choice; `stages`: where the stages are now."""
        return self.staged.plan

    @property
    def options(self) -> PlanOptions:
        return self.staged.options

    @property
    def owners(self) -> Mapping[int, StageRunner]:
        return {} if self.placement is None else self.placement.owners

    @property
    def stages(self) -> tuple[StageAssignment, ...]:
        """The plan's stages, on the nodes where their runners are or were last."""
        return tuple(
            replace(stage, node=self.owners[number].key.node) if number in self.owners else stage
            for number, stage in enumerate(self.plan.stages)
        )

    @property
    def endpoints(self) -> list[Endpoint]:
        """The stages' runners in order, up to the first one that is not loaded."""
        endpoints: list[Endpoint] = []
        for number in range(len(self.plan.stages)):
            runner = self.owners.get(number)
            if runner is None or runner.ready is None:
                break
            endpoints.append(Endpoint(runner.key.node, runner.ready))
        return endpoints

    @property
    def is_loaded(self) -> bool:
        """Whether every stage of the plan has a runner that is loaded."""
        return len(self.endpoints) == len(self.plan.stages)

    @property
    def generator(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def epoch(self) -> Epoch:
        return UNCONNECTED if self.placement is None else self.placement.epoch

    @property
    def specs(self) -> list[pb.StageSpec]:
        owners = (self.owners[stage] for stage in sorted(self.owners))
        return [runner.spec for runner in owners if runner.spec is not None]

    @property
    def status(self) -> Status:
        if self.error and self.placement is None:
            return "failed"
        if self.placement is not None and self.placement.connected:
            return "ready"
        return "restoring" if self.proven else "loading"

    @property
    def head(self) -> HeadState:
        """Whether the generator's runner loaded the draft head, or why not."""
        if not self.endpoints:
            return HeadState(False, "not loaded")
        ready = self.generator.ready
        loaded = ready.mtp_head == "loaded"
        return HeadState(loaded, "" if loaded else ready.mtp_head)

    @property
    def identity(self) -> str:
        """greedy_identity as it was measured when the generator was ready."""
        return self.generator.ready.greedy_identity if self.endpoints else "off"

    def begin(self) -> Epoch:
        """An answer begins on it; pass the epoch to `Placements.end`."""
        self.activity.begin(self.epoch)
        return self.epoch

    def kernels(self) -> tuple[str, ...]:
        """The code that computes each layer, the dtype, the bits of caches and the rows of a
        prompt's forwards: where these are equal, the same tokens give the same numbers."""
        layers = [
            " ".join((self.chips.get(stage.node, stage.node), *endpoint.ready.kernels))
            for stage, endpoint in zip(self.stages, self.endpoints, strict=True)
            for _ in range(stage.first_layer, stage.end_layer)
        ]
        rows, bits = f"{self.plan.prefill_chunk} rows", self.plan.kv_bits.bits
        return (self.plan.dtype, rows, *([f"caches of {bits} bits"] if bits else []), *layers)

    def where(self, name: Callable[[NodeId], str]) -> str:
        """The names of its nodes, each once, in the order of its stages."""
        return ", ".join(dict.fromkeys(name(stage.node) for stage in self.stages))

    def moves(self, name: Callable[[NodeId], str]) -> str:
        """Such as `attic has the layers of desk, which was lost`; empty where every stage is where
        it was planned."""
        lost = ", which was lost" if self.why else ""
        pairs = zip(self.plan.stages, self.stages, strict=True)
        moved = dict.fromkeys((now.node, then.node) for then, now in pairs if now.node != then.node)
        return "; ".join(f"{name(now)} has the layers of {name(then)}{lost}" for now, then in moved)

    def restoring_step(self, name: Callable[[NodeId], str]) -> str:
        """The nodes that load its lost layers, for a person; empty where none do."""
        loading = [o.key.node for o in self.owners.values() if o.state == "loading"]
        if self.lost_at is None or not loading:
            return ""
        return f"loading the lost layers on {' and '.join(dict.fromkeys(map(name, loading)))}"


def placed_of(record: LoadedPlacement) -> pb.Placed:
    """The placement as the entry node of an answer on it receives it."""
    stages = [
        pb.PlacedStage(
            node=endpoint.node,
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            ready=endpoint.ready,
        )
        for stage, endpoint in zip(record.stages, record.endpoints, strict=True)
    ]
    return pb.Placed(
        placement=record.id,
        stages=stages,
        epoch=epoch_to_wire(record.epoch),
        kernels=record.kernels(),
        head_loaded=record.head.loaded,
        head_reason=record.head.reason,
    )


def epoch_to_wire(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(term=epoch.term, number=epoch.number, head=epoch.head)


def epoch_from_wire(epoch: pb.Epoch) -> Epoch:
    return Epoch(epoch.term, epoch.number, epoch.head)
