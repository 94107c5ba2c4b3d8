"""The values that the reconciler reads, and the actions that it returns. Pure.

A runner carries the whole plan of its placement, and an epoch once it was connected. So every head
reads placements from runners, and nothing has to be handed over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, Protocol

from ...placement.cluster import StageAssignment
from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.options import PlanOptions
from ...placement.plan import Placement as NodePlan
from ...placement.reading import ReadingPlan
from ...proto import peer_pb2 as pb
from ..cluster.desired import Desired
from ..machine.timing import Timing

RunnerState = Literal["loading", "ready", "stopping"]
FailureKind = Literal["node", "gone", "loss", "unreached", "load", "extra", "files", "plan"]
"""A node that did not answer a call; a node that died or left; a ready runner that ended or hangs;
a ready runner that no call has reached since it was loaded; a load; a load that no answer waits
for; a load of files that are broken; a load that showed that the model must be planned otherwise,
because it cannot be split so or its caches not quantised."""


class Epoch(NamedTuple):
    """One connection of a placement's stages. Runners enter a higher one only."""

    term: int = 0
    number: int = 0
    head: str = ""


UNCONNECTED = Epoch()
_NONE = PlacementId("")


class RunnerKey(NamedTuple):
    """A node has one runner of a placement's stage at most."""

    node: NodeId
    placement: PlacementId
    stage: int


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The planner's choice, with the bounds of the question and each stage's promised memory."""

    plan: NodePlan
    options: PlanOptions
    """The requested bounds; the plan may be for fewer nodes."""
    memory: tuple[int, ...]
    """Bytes that each stage's runner is promised."""
    frugal: bool = False
    """Without memory that it can do without."""
    displaced: bool = False
    """Made while nodes were missing or failed: planned again when the model is idle."""
    reader: tuple[StageAssignment, int] | None = None
    """Upper layers, and the promised memory, of a runner that reads prompts for this placement: its
    number is none of the stages'."""

    @property
    def model(self) -> ModelId:
        return self.plan.model

    @property
    def nodes(self) -> list[NodeId]:
        return [stage.node for stage in self.plan.stages]

    def __len__(self) -> int:
        return len(self.memory)

    def promised(self, stage: int) -> int:
        """Bytes that the runner of a stage, or that reader, is promised."""
        if stage < len(self.memory):
            return self.memory[stage]
        return 0 if self.reader is None else self.reader[1]


@dataclass(frozen=True, slots=True)
class StageRunner:
    """A process that holds one stage, from the request to load it until it is gone."""

    key: RunnerKey
    plan: StagedPlan
    state: RunnerState = "ready"
    since: float = -inf
    """When this head requested it, or first saw it."""
    epoch: Epoch = UNCONNECTED
    adopted: bool = False
    """Another head loaded it, or this one before it led again."""
    silent: bool = False
    """It did not answer a ping."""
    requests: int = 0
    """Answers that its node counts on it."""
    used_memory: int = 0
    ready: pb.LoadReady | None = field(default=None, compare=False)
    spec: pb.StageSpec | None = field(default=None, compare=False)

    @property
    def memory(self) -> int:
        return max(self.plan.promised(self.key.stage), self.used_memory)

    @property
    def is_reader(self) -> bool:
        """Whether it has upper layers, only to read prompts for the placement's generator."""
        return self.key.stage >= len(self.plan)


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A live node as the head sees it."""

    id: NodeId
    memory: int
    """Bytes usable for models."""
    draining: bool = False
    follows: bool = True
    """Its heartbeats name this node as the head."""
    alive_since: float = -inf
    """Since when this head has heard it without a gap."""
    heard_at: float = inf
    """When it reported this, or inf if it is this node: all is as it is now."""
    stages: Sequence[pb.StageState] | None = field(default=None, compare=False)
    """The runners that it reports, or None if it was not asked."""


@dataclass(frozen=True, slots=True)
class RunnerFailure:
    """Something that went wrong with a model's runner."""

    model: ModelId
    node: NodeId
    kind: FailureKind
    at: float
    placement: PlacementId = _NONE
    stage: int = 0
    error: ExoNodeError = field(default_factory=lambda: ExoNodeError(""))


@dataclass(frozen=True, slots=True)
class Demand:
    """How long answers have crowded a placement, or none has used it."""

    crowded_since: float = inf
    """Since when it has had several answers at once, or inf if it has not."""
    idle_since: float = inf
    """Since when it has had no answer, or inf if it has one."""
    reading_until: float = -inf
    """When the prompts of its answers will have been read, as predicted."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that the head knows. An action in flight is part of it, so that none is repeated."""

    nodes: tuple[LiveNode, ...] = ()
    runners: tuple[StageRunner, ...] = ()
    waiting: Mapping[ModelId, float] = field(default_factory=dict[ModelId, float])
    """Since when the first of a model's requests without a placement waits."""
    answers: Mapping[tuple[PlacementId, Epoch], int] = field(
        default_factory=dict[tuple[PlacementId, Epoch], int]
    )
    """The number of answers by the placement and the epoch that they run in."""
    demand: Mapping[PlacementId, "Demand"] = field(default_factory=dict[PlacementId, "Demand"])
    broken: Mapping[PlacementId, Epoch] = field(default_factory=dict[PlacementId, Epoch])
    """The epoch in which an answer was lost although all runners answer pings."""
    failures: tuple[RunnerFailure, ...] = ()
    answered_at: Mapping[ModelId, float] = field(default_factory=dict[ModelId, float])
    """When an answer last went well: earlier failures do not count."""
    proven: frozenset[ModelId] = frozenset()
    """Models that were ready under this head."""
    retiring: Mapping[PlacementId, float] = field(default_factory=dict[PlacementId, float])
    """Since when a placement is being replaced or removed."""
    given_up: Mapping[ModelId, "GiveUp"] = field(default_factory=dict[ModelId, "GiveUp"])
    busy: frozenset[PlacementId] = frozenset()
    """Placements whose runners are being connected or pinged."""
    serial: int = 0
    """Placements and epochs that this head has named."""

    def ledger(self) -> dict[NodeId, int]:
        """Unpromised bytes of each node. A runner counts from the request until it is gone."""
        unused = {node.id: node.memory for node in self.nodes}
        for runner in self.runners:
            if runner.key.node in unused:
                unused[runner.key.node] -= runner.memory
        return unused


class PlanningView(Protocol):
    """The planner, and what it knows about nodes, links and models."""

    head: NodeId
    term: int
    leads_since: float
    timing: Timing

    def plan(
        self, desired: Desired, free: Mapping[NodeId, int], *, frugal: bool, shorten: bool = False
    ) -> "StagedPlan | ExoNodeError":
        """A plan for `desired.options` within `free` bytes by node, or why there is none.

        `shorten`: with less than the usual context where that fits nowhere.
        """
        ...

    def seconds(self, plan: StagedPlan, nodes: Sequence[NodeId]) -> float:
        """Predicted seconds a token with the plan's stages on these nodes, or inf."""
        ...

    def prompt_seconds(self, plan: StagedPlan, nodes: Sequence[NodeId]) -> float:
        """Predicted seconds a row of a prompt with the plan's stages on these nodes."""
        ...

    def copy_seconds(self, plan: StagedPlan, source: NodeId, target: NodeId, nbytes: int) -> float:
        """Predicted seconds to copy bytes between two nodes, or inf without a measured link."""
        ...

    def reading(
        self,
        plan: StagedPlan,
        answering: NodeId,
        others: Mapping[NodeId, tuple[int, int]],
        rows: int,
        cached_rows: int,
    ) -> ReadingPlan:
        """The readers of a prompt of `rows` rows on a whole model's placement.

        `others`: the first layer that each other node has, and how many answers and prompts."""
        ...

    def reader(
        self, plan: StagedPlan, answering: NodeId, node: NodeId, free: int
    ) -> StagedPlan | None:
        """The plan with a reader on a node with `free` bytes; None if it has not the model's files,
        no room, or nothing to gain."""
        ...

    def lacks_head(self, plan: StagedPlan, generator: StageRunner) -> bool:
        """It was loaded without its draft head because of a switch that is on now."""
        ...

    def short_of_chunk(self, plan: StagedPlan) -> frozenset[NodeId]:
        """The nodes that a GPU fault has left shorter chunks of prompts than the plan's."""
        ...

    def name(self, serial: int) -> PlacementId:
        """The name of a new placement, which none had before."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Start a runner of one stage."""

    key: RunnerKey
    plan: StagedPlan
    extra: bool = False
    """No answer waits for it: its failure is not one of the model."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect runners, in stage order, as one placement in a new epoch."""

    placement: PlacementId
    epoch: Epoch
    runners: tuple[RunnerKey, ...]


@dataclass(frozen=True, slots=True)
class Unload:
    """End a runner; `kill`: without asking it first."""

    key: RunnerKey
    why: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Replan:
    """Mark a placement as being replaced: no new answers, unloaded once idle."""

    placement: PlacementId
    model: ModelId
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """End a model's keep_alive now; the next request loads it again."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Answer waiting requests with an error, and try no load before `until`. Kept until Retry."""

    model: ModelId
    at: float
    until: float
    error: ExoNodeError
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """Clear the mark that GiveUp set."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class Scale:
    """Change the number of a model's replicas, which follows its answers."""

    model: ModelId
    replicas: int
    why: str
    retired: PlacementId = _NONE
    """The replica that goes."""


Action = Load | Connect | Unload | Replan | Release | GiveUp | Retry | Scale
