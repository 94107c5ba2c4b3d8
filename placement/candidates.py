"""The placements that come into question, each with what it costs."""

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
from .options import Allowed
from .search import Outcome, Problem, Route, search

# Costs are picoseconds, and in the last ten bits what decides between equally fast placements:
# fewer nodes, then fewer of them that must download the model.
_TICKS_PER_S = 10**12
_TIE_BITS = 10
_PER_NODE = 32


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be placed, and where it may go."""

    card: ModelCard
    view: ClusterView
    allowed: Allowed
    mtp: bool
    """The card declares a head, and the operator lets it draft."""

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.card, self.allowed.context)

    def holds_head(self, node: NodeFacts) -> bool:
        """Whether the whole model fits there with its MTP head."""
        need = self.sizes.need(0, self.card.num_layers, generator=True, mtp=True)
        return self.mtp and need <= node.memory_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """One placement."""

    nodes: tuple[NodeFacts, ...]
    stages: tuple[StageAssignment, ...]
    seconds: float
    """A token, with native MTP where it runs."""
    speedup: float
    """Of native MTP; 0 where it does not run."""
    cost: int
    """What it is ranked by."""

    @property
    def rank(self) -> tuple[object, ...]:
        """The least is the best; ends with the ids, so that equals are ordered too."""
        alone = len(self.nodes) == 1
        memory = -self.nodes[0].memory_bytes if alone else 0
        return (self.cost, len(self.nodes), memory, *(node.id for node in self.nodes))

    def __str__(self) -> str:
        names = " + ".join(node.name for node in self.nodes)
        alone = " alone" if len(self.nodes) == 1 else ""
        drafts = " with native MTP" if self.speedup else ""
        source = "as measured" if all(n.profile for n in self.nodes) else "by memory bandwidth"
        return f"{names}{alone}, {self.seconds * 1000:.3g} ms a token{drafts} {source}"


def singles(task: Task) -> list[Candidate]:
    """Every allowed node that can hold the whole model."""
    layers = task.card.num_layers
    need = task.sizes.need(0, layers, generator=True)
    return [
        assigned(task, (node,), [layers])
        for node in task.allowed.nodes
        if need <= node.memory_bytes
    ]


def pipelines(task: Task, known: Sequence[Candidate]) -> tuple[list[Candidate], Outcome]:
    """The best two over several nodes, as far as they beat `known`; and what is proven."""
    nodes = sorted(
        task.allowed.nodes, key=lambda node: (_ticks(layer_seconds(task.card, node)), node.id)
    )
    outcome = search(_problem(task, nodes), [candidate.cost for candidate in known])
    return [_routed(task, nodes, route) for route in outcome.routes], outcome


def assigned(
    task: Task, nodes: tuple[NodeFacts, ...], counts: Sequence[int], cost: int | None = None
) -> Candidate:
    """`counts` layers on each of `nodes`, in this order; `cost` where it is known."""
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


def _routed(task: Task, nodes: Sequence[NodeFacts], route: Route) -> Candidate:
    return assigned(task, tuple(nodes[i] for i in route.nodes), route.counts, route.cost)


def _problem(task: Task, nodes: Sequence[NodeFacts]) -> Problem:
    card, bounds = task.card, task.allowed
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
        least=max(2, bounds.least),
        most=bounds.most,
        required=(1 << len(nodes)) - 1 if bounds.pinned else 0,
        split=bounds.split,
    )


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_S) << _TIE_BITS


def _tie(task: Task, node: NodeFacts) -> int:
    return _PER_NODE + (task.card.id not in node.models)
