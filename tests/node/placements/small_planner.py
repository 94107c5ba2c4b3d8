"""A planner that fits on a page, and short ways to write states: for tests of the reconciler.

Nodes are letters, models too, memory is counted in tens. A model has four layers of ten bytes
unless its size says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

from exo_node.node.cluster.desired import Desired, relaxed
from exo_node.node.machine.timing import LAN, Timing
from exo_node.node.placements.state import (
    UNCONNECTED,
    Action,
    Connect,
    Epoch,
    GiveUp,
    Load,
    Release,
    Replan,
    Retry,
    RunnerKey,
    Scale,
    StagedPlan,
    StageRunner,
    Unload,
)
from exo_node.placement.cluster import StageAssignment
from exo_node.placement.errors import ExoNodeError, InsufficientMemory
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.options import ANY, PlanOptions
from exo_node.placement.plan import Placement
from exo_node.placement.reading import ALONE, ReaderNode, ReadingPlan, ReadingSizes, plan_reading

HOP_S = 0.004
ONE, TWO = Epoch(1, 1, "a"), Epoch(1, 2, "a")
BY_B = Epoch(1, 2, "b")


@dataclass(frozen=True)
class Size:
    """A model: layers, bytes of each, and optional bytes of each, as for a longer context."""

    layers: int = 4
    memory: int = 10
    extra: int = 0


@dataclass
class SmallPlanner:
    """`PlanningView`: weighs all sets of up to three nodes, the fastest of each filled first."""

    sizes: Mapping[str, Size] = field(default_factory=dict[str, Size])
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds a layer."""
    head: NodeId = field(default=NodeId("a"))
    term: int = 1
    leads_since: float = -inf
    timing: Timing = LAN
    lacking: frozenset[str] = frozenset()
    """Models whose draft head was left out because of a switch that is on by now."""

    chunk_limits: Mapping[str, int] = field(default_factory=dict[str, int])
    """By node, after a GPU fault."""
    link_rate: float = 0.0
    reading_rate: float = 0.0
    """Bytes a second between two nodes; 0: not measured."""

    def plan(
        self, desired: Desired, free: Mapping[NodeId, int], *, frugal: bool, shorten: bool = False
    ) -> StagedPlan | ExoNodeError:
        """The context has no size here, so `shorten` changes nothing."""
        options = relaxed(desired.options, free.keys())
        size = self.sizes.get(desired.model, Size())
        usable = set(options.nodes or free) & set(free) - options.exclude
        most = min(len(usable), options.max_nodes or 3, size.layers)
        least = len(options.nodes) or options.min_nodes
        best: StagedPlan | None = None
        for count in range(least, most + 1):
            for chosen in combinations(sorted(usable), count):
                plan = self._split(desired, chosen, free, size, frugal=frugal)
                if plan is not None and (best is None or plan.plan.score < best.plan.score - 1e-12):
                    best = plan
        if best is None:
            return InsufficientMemory(f"no live nodes have room for {desired.model}")
        return replace(best, displaced=options != desired.options)

    def _split(
        self,
        desired: Desired,
        nodes: Sequence[NodeId],
        free: Mapping[NodeId, int],
        size: Size,
        *,
        frugal: bool,
    ) -> StagedPlan | None:
        order = sorted(nodes, key=lambda node: (self.speeds.get(node, 0.01), node))
        counts = dict.fromkeys(order, 1)
        rest = size.layers - len(order)
        for node in order:
            more = min(rest, free[node] // size.memory - 1)
            if more < 0:
                return None
            counts[node] += more
            rest -= more
        if rest > 0:
            return None
        parts: list[str] = []
        memory: list[int] = []
        for node in order:
            need, extra = counts[node] * size.memory, counts[node] * size.extra
            generous = not frugal and extra <= (free[node] - need) // 2
            parts.append(f"{node}{counts[node]}")
            memory.append(need + (extra if generous else 0))
        staged = staged_plan(desired.model, *parts, options=desired.options)
        score = self.seconds(staged, order)
        return replace(
            staged, plan=replace(staged.plan, score=score), memory=tuple(memory), frugal=frugal
        )

    def seconds(self, plan: StagedPlan, nodes: Sequence[NodeId]) -> float:
        counts = [stage.end_layer - stage.first_layer for stage in plan.plan.stages]
        total = sum(
            count * self.speeds.get(node, 0.01) for count, node in zip(counts, nodes, strict=True)
        )
        return total * 0.6 if len(counts) == 1 else total + HOP_S * len(counts)

    def prompt_seconds(self, plan: StagedPlan, nodes: Sequence[NodeId]) -> float:
        return self.seconds(plan, nodes) / 10

    def copy_seconds(self, plan: StagedPlan, source: NodeId, target: NodeId, nbytes: int) -> float:
        return nbytes / self.link_rate if self.link_rate else inf

    def reading(
        self,
        plan: StagedPlan,
        answering: NodeId,
        others: Mapping[NodeId, tuple[int, int]],
        rows: int,
        cached_rows: int,
    ) -> ReadingPlan:
        """Layers are read as quickly on each node; `reading_rate`: bytes a second of links."""
        if not self.reading_rate:
            return ALONE
        layers = plan.plan.stages[0].end_layer
        row_s = {n: self.prompt_seconds(plan, [n]) / layers for n in (answering, *others)}
        readers = [
            ReaderNode(node, row_s[node] * (1 + busy), 1e-3, self.reading_rate, first)
            for node, (first, busy) in others.items()
        ]
        sizes = ReadingSizes(layers, 100, 10.0, 10, 10.0)
        return plan_reading(rows, cached_rows, row_s[answering], readers, sizes, {})

    def reader(
        self, plan: StagedPlan, answering: NodeId, node: NodeId, free: int
    ) -> StagedPlan | None:
        """The upper half of the layers, where they have room and prompts are read with others."""
        del answering
        end = plan.plan.stages[0].end_layer
        need = (end - end // 2) * self.sizes.get(plan.model, Size()).memory
        if not self.reading_rate or free < need:
            return None
        return replace(plan, reader=(StageAssignment(node, end // 2, end), need))

    def short_of_chunk(self, plan: StagedPlan) -> frozenset[NodeId]:
        rows = plan.plan.prefill_chunk
        return frozenset(NodeId(n) for n, most in self.chunk_limits.items() if most < rows)

    def lacks_head(self, plan: StagedPlan, generator: StageRunner) -> bool:
        return plan.model in self.lacking

    def name(self, serial: int) -> PlacementId:
        return PlacementId(f"n{serial}")


def staged_plan(
    model: str, *parts: str, options: PlanOptions = ANY, memory: int = 10, **fields: object
) -> StagedPlan:
    """`staged_plan("m", "a2", "b2")`: two layers of ten bytes on each node."""
    stages: list[StageAssignment] = []
    first = 0
    for part in parts:
        count = int(part[1:])
        stages.append(StageAssignment(NodeId(part[0]), first, first + count))
        first += count
    plan = Placement(
        ModelId(model), tuple(stages), "why", 0.02, None, 512, "", "float32", "as asked"
    )
    sizes = tuple(memory * (stage.end_layer - stage.first_layer) for stage in stages)
    staged = StagedPlan(plan, options, sizes)
    return replace(staged, **fields)  # pyright: ignore[reportArgumentType]


def runner(
    name: str, stage: int, node: str, plan: StagedPlan, epoch: Epoch = UNCONNECTED, **fields: object
) -> StageRunner:
    key = RunnerKey(NodeId(node), PlacementId(name), stage)
    runner = StageRunner(key, plan, "ready", 0.0, epoch)
    return replace(runner, **fields)  # pyright: ignore[reportArgumentType]


def runners(
    name: str, plan: StagedPlan, epoch: Epoch = ONE, **fields: object
) -> tuple[StageRunner, ...]:
    """The runners of a whole placement, where the plan has them."""
    return tuple(
        runner(name, number, node, plan, epoch, **fields) for number, node in enumerate(plan.nodes)
    )


def text(action: Action) -> str:
    """An action as tests write it."""
    match action:
        case Load(key, extra=extra):
            what = "extra" if extra else "load"
            return f"{what} {key.placement}/{key.stage} on {key.node}"
        case Connect(placement, _, keys):
            return f"connect {placement}: {' '.join(key.node for key in keys)}"
        case Unload(key, _, kill):
            return f"{'kill' if kill else 'unload'} {key.placement}/{key.stage} on {key.node}"
        case Replan(placement):
            return f"replan {placement}"
        case Release(model):
            return f"release {model}"
        case GiveUp(model, _, until, no_room=no_room):
            return f"give up {model} until {'room' if no_room else f'{until:g}'}"
        case Retry(model):
            return f"retry {model}"
        case Scale(model, replicas, _, retired):
            return f"scale {model} to {replicas}" + (f" without {retired}" if retired else "")
