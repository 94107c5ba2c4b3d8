"""The placements to choose from, each with its cost: single nodes and pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .card import ModelCard
from .cluster import ClusterView, LinkFacts, NodeFacts, StageAssignment
from .cost import (
    ModelSizes,
    hop_seconds,
    layer_seconds,
    mtp_speedup,
    seconds_per_token,
    tail_seconds,
)
from .ids import NodeId
from .options import PlanLimits
from .search import Problem, SearchResult, search

# Costs are picoseconds. The last ten bits decide between equally fast placements: fewer nodes, then
# fewer of them that must download the model.
_TICKS_PER_S = 10**12
_TIE_BITS = 10
_PER_NODE = 32


@dataclass(frozen=True, slots=True)
class PlacementTask:
    """The model to be placed, and the nodes that it may run on."""

    card: ModelCard
    view: ClusterView
    limits: PlanLimits

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.card, self.limits.context)

    def holds_head(self, node: NodeFacts) -> bool:
        """Whether the whole model fits there with what drafts for it."""
        need = self.sizes.need(0, self.card.num_layers, generator=True, mtp=True)
        return self.card.drafts is not None and need <= node.memory_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """One placement."""

    nodes: tuple[NodeFacts, ...]
    stages: tuple[StageAssignment, ...]
    seconds: float
    """One token of one request, with native MTP where it runs."""
    speedup: float
    """The factor of native MTP; 0 where it does not run."""
    cost: int
    """The first key of `rank`."""

    @property
    def rank(self) -> tuple[object, ...]:
        """A sort key, the best first; ends with the ids, so that equals are ordered too."""
        alone = len(self.nodes) == 1
        memory = -self.nodes[0].memory_bytes if alone else 0
        return (self.cost, len(self.nodes), memory, *(node.id for node in self.nodes))

    def __str__(self) -> str:
        names = " + ".join(node.name for node in self.nodes)
        alone = " alone" if len(self.nodes) == 1 else ""
        drafts = " with drafts" if self.speedup else ""
        source = "as measured" if all(n.profile for n in self.nodes) else "estimated"
        return f"{names}{alone}, {self.seconds * 1000:.3g} ms a token{drafts} {source}"


def single_nodes(task: PlacementTask) -> list[Candidate]:
    """Every allowed node that can hold the whole model."""
    layers = task.card.num_layers
    need = task.sizes.need(0, layers, generator=True)
    return [
        candidate(task, (node,), [layers])
        for node in task.limits.nodes
        if need <= node.memory_bytes
    ]


def pipelines(
    task: PlacementTask, others: Sequence[Candidate]
) -> tuple[list[Candidate], SearchResult]:
    """The two best over several nodes, where they beat `others`; and how the search went."""
    nodes = sorted(
        task.limits.nodes, key=lambda node: (_ticks(layer_seconds(task.card, node)), node.id)
    )
    result = search(_problem(task, nodes), [other.cost for other in others])
    routes = [
        candidate(task, tuple(nodes[i] for i in route.nodes), route.counts, route.cost)
        for route in result.routes
    ]
    return routes, result


def candidate(
    task: PlacementTask,
    nodes: tuple[NodeFacts, ...],
    counts: Sequence[int],
    cost: int | None = None,
) -> Candidate:
    """`counts` layers on each of `nodes`, in this order; `cost` if the search has computed it."""
    ends = list(accumulate(counts))
    stages = tuple(
        StageAssignment(node.id, end - count, end)
        for node, count, end in zip(nodes, counts, ends, strict=True)
    )
    plain = seconds_per_token(task.card, stages, task.view)
    drafts = len(nodes) == 1 and task.holds_head(nodes[0])
    speedup = mtp_speedup(task.card, nodes[0]) if drafts else 0.0
    seconds = plain / speedup if drafts else plain
    if cost is None:
        cost = _ticks(seconds) + sum(_tie(task, node) for node in nodes)
    return Candidate(nodes, stages, seconds, speedup, cost)


def seconds_of(cost: int) -> float:
    """The seconds in a cost."""
    return (cost >> _TIE_BITS) / _TICKS_PER_S


def _problem(task: PlacementTask, nodes: Sequence[NodeFacts]) -> Problem:
    card, limits = task.card, task.limits
    links: dict[frozenset[NodeId], list[LinkFacts]] = {}
    for link in task.view.links:
        links.setdefault(frozenset((link.a, link.b)), []).append(link)

    def hop(a: NodeFacts, b: NodeFacts) -> int:
        seconds = hop_seconds(card, links.get(frozenset((a.id, b.id)), []))
        return _ticks(seconds) + _tie(task, b)

    return Problem(
        sizes=task.sizes,
        memory=[node.memory_bytes for node in nodes],
        layer=[_ticks(layer_seconds(card, node)) for node in nodes],
        tail=[_ticks(tail_seconds(card, node)) for node in nodes],
        hop=[[0 if a is b else hop(a, b) for b in nodes] for a in nodes],
        min_stages=max(2, limits.min_stages),
        max_stages=limits.max_stages,
        required=(1 << len(nodes)) - 1 if limits.pinned else 0,
        split=limits.split,
    )


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S) << _TIE_BITS


def _tie(task: PlacementTask, node: NodeFacts) -> int:
    return _PER_NODE + (task.card.id not in node.models)
