"""One placement and what became of it: its stages, its spares, who uses it."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView, StageAssignment
from ...placement.drafting import HeadState
from ...placement.ids import NodeId, PlacementId
from ...placement.options import PlanOptions
from ...placement.plan import Placement
from ...proto import peer_pb2 as pb
from ..cluster.desired import DesiredPlacement
from ..runners.runner_client import Endpoint
from .activity import Activity
from .load_state import Load, Status

SpareStatus = Literal["loading", "ready", "failed"]


@dataclass(slots=True)
class Spare:
    """A second runner of a stage, loaded, that takes its place when it is lost."""

    stage: int
    node: NodeId
    endpoint: Endpoint | None = None
    error: str = ""

    @property
    def status(self) -> SpareStatus:
        if self.endpoint is not None:
            return "ready"
        return "failed" if self.error else "loading"


@dataclass(slots=True)
class LoadedPlacement:
    """A placement on its head: what was planned, how its load stands, who uses it, where it is."""

    id: Final[PlacementId]
    card: Final[ModelCard]
    plan: Final[Placement]
    """As it was made, or as the last head left it. Where the stages are now: `stages`."""
    options: Final[PlanOptions] = field(default_factory=PlanOptions)
    spares_wanted: Final[int] = 0
    """Spares of each stage."""
    load: Final[Load] = field(default_factory=Load)
    activity: Final[Activity] = field(default_factory=Activity)
    stages: tuple[StageAssignment, ...] = field(init=False)
    """Those of the plan, less what losses have moved."""
    specs: list[pb.StageSpec] = field(default_factory=list[pb.StageSpec])
    endpoints: list[Endpoint] = field(default_factory=list[Endpoint])
    spares: list[Spare] = field(default_factory=list[Spare])
    filled_at: float = float("-inf")
    """When its spares were last seen to, by the monotonic clock."""
    spares_missing: str = ""
    """Why there are fewer spares than were asked for."""
    chips: dict[NodeId, str] = field(default_factory=dict[NodeId, str])
    """Backend and chip of the nodes that were seen: MLX's numbers follow from them."""
    head_asked_for: bool = False
    head: HeadState = field(default_factory=lambda: HeadState(False, "not loaded"))
    identity: str = "off"
    """greedy_identity as the generator measured it at load."""
    gone: set[int] = field(default_factory=set[int])
    """Stages that are known to be lost."""
    retired: list[tuple[int, Endpoint]] = field(default_factory=list[tuple[int, Endpoint]])
    """Stages' former runners, which are to be ended."""
    restoring: "asyncio.Task[None] | None" = None
    """The work of it, until its last bit; the state may be another one by then."""
    connections: int = 0
    """How often its stages were connected: what broke before the last time is mended."""
    moved: str = ""
    """For a person: what losses have changed about `plan`."""
    moved_at: float = field(default_factory=time.monotonic)
    """When that was, or a place was last looked for, by the monotonic clock."""
    proven: bool = False
    """It was ready once, or the placement before it was: a failure is tried again by itself."""
    unloaded: bool = False
    """It holds nothing any more, and is promised nothing."""

    def __post_init__(self) -> None:
        self.stages = self.plan.stages

    @property
    def status(self) -> Status:
        return self.load.status

    @property
    def in_memory(self) -> ModelCard:
        """The card of what its stages hold, in the dtype that they compute in."""
        return self.card.computed_in(self.plan.dtype)

    @property
    def desired(self) -> DesiredPlacement:
        """What is asked of a placement that takes its place."""
        return DesiredPlacement(self.options, self.spares_wanted, flexible=True)

    @property
    def generator(self) -> Endpoint:
        return self.endpoints[0]

    def see(self, view: ClusterView) -> None:
        """Remembers the chips of the live nodes: a lost one's is asked for afterwards."""
        self.chips.update({node.id: f"{node.backend} {node.chip}" for node in view.nodes})

    def move(self, stage: int, endpoint: Endpoint) -> None:
        """Puts another runner in a stage's place."""
        self.assign(stage, endpoint.node)
        self.endpoints[stage] = endpoint
        self.gone.discard(stage)
        self.take_over()

    def assign(self, stage: int, node: NodeId) -> None:
        """The stage is loaded on that node from now on: its memory is promised."""
        stages = list(self.stages)
        stages[stage] = replace(stages[stage], node=node)
        self.stages = tuple(stages)

    def take_over(self) -> None:
        """Notes what the generator's runner said when it was loaded."""
        ready = self.generator.ready
        loaded = ready.mtp_head == "loaded"
        self.identity = ready.greedy_identity
        self.head = HeadState(loaded, "" if loaded else ready.mtp_head)

    def kernels(self) -> tuple[str, ...]:
        """What computes each layer, and the dtype: where it is equal, the same forwards give the
        same numbers."""
        layers = [
            " ".join((self.chips.get(stage.node, stage.node), *endpoint.ready.kernels))
            for stage, endpoint in zip(self.stages, self.endpoints, strict=True)
            for _ in range(stage.first_layer, stage.end_layer)
        ]
        return (self.specs[0].dtype, *layers)

    def note_move(self, what: str) -> None:
        self.moved, self.moved_at = what, time.monotonic()

    def moves(self, names: Mapping[NodeId, str]) -> str:
        """Such as `stage 1 moved to attic`; empty where every stage is where it was planned."""
        stages = enumerate(zip(self.plan.stages, self.stages, strict=True))
        return ", ".join(
            f"stage {number} moved to {names.get(now.node, now.node)}"
            for number, (then, now) in stages
            if now.node != then.node
        )

    def holders(self) -> set[tuple[NodeId, int]]:
        """(node, stage) of every runner that this placement has or waits for."""
        stages = {(stage.node, number) for number, stage in enumerate(self.stages)}
        return stages | {(spare.node, spare.stage) for spare in self.spares}


def expected_runners(
    records: Iterable[LoadedPlacement],
) -> dict[NodeId, list[tuple[NodeId, str, int]]]:
    """By node, the (node, placement, stage) whose runners should be up."""
    runners: dict[NodeId, list[tuple[NodeId, str, int]]] = {}
    for record in records:
        if record.status != "ready":
            continue
        holders = {(endpoint.node, i) for i, endpoint in enumerate(record.endpoints)}
        holders |= {(s.node, s.stage) for s in record.spares if s.status == "ready"}
        for node, stage in holders:
            runners.setdefault(node, []).append((node, str(record.id), stage))
    return runners


def placed_of(record: LoadedPlacement) -> pb.Placed:
    """What the node that drives an answer is told of the placement it runs on."""
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
        connections=record.connections,
        kernels=record.kernels(),
        head_loaded=record.head.loaded,
        head_reason=record.head.reason,
    )
