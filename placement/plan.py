"""Chooses the nodes of a model, and tells a person why."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from .card import ModelCard
from .cluster import ClusterView, NodeFacts, StageAssignment
from .cost import bandwidth_of, seconds_per_token, stage_bytes
from .drafting import split_reason
from .errors import InsufficientMemory, InvalidRequest
from .ids import ModelId, NodeId
from .split import stage_ends

__all__ = ["DEFAULT_CONTEXT", "Placement", "StageAssignment", "plan"]

DEFAULT_CONTEXT = 32768
"""Tokens of KV that a placement has room for when nobody asks: longer is a choice with a price."""

ASSUMED_MTP_SPEEDUP = 1.2
"""Ranks a node that holds the head against one that cannot; the least of the published gains."""

# Sets of nodes are tried among those with the most memory: at most 70 sets of a size.
_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs. The first stage is the generator."""

    model: ModelId
    stages: tuple[StageAssignment, ...]
    reason: str
    """For a person: why these nodes, and why no MTP where there is none."""
    score: float
    """Seconds a token, predicted for plain decoding."""
    runner_up: str | None
    """The next best choice, for a person."""
    context_length: int
    """Tokens of KV that were counted."""
    mtp_off_reason: str
    """Why the generator must not load a head that the card declares; empty where it may."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked, and of whom."""

    card: ModelCard
    view: ClusterView
    nodes: tuple[NodeFacts, ...]
    context: int
    mtp: bool

    def fits(
        self, node: NodeFacts, first: int, end: int, *, generator: bool, mtp: bool = False
    ) -> bool:
        need = stage_bytes(self.card, first, end, generator, self.context, mtp)
        return need <= node.memory_bytes


@dataclass(frozen=True, slots=True)
class _Candidate:
    nodes: tuple[NodeFacts, ...]
    stages: tuple[StageAssignment, ...]
    seconds: float
    rank: tuple[object, ...]
    """The least is the best; ends with the ids, so that equals are ordered too."""

    def __str__(self) -> str:
        names = " + ".join(node.name for node in self.nodes)
        alone = " alone" if len(self.nodes) == 1 else ""
        return f"{names}{alone}, {self.seconds * 1000:.3g} ms a token by memory bandwidth"


def plan(
    card: ModelCard,
    view: ClusterView,
    *,
    min_nodes: int = 1,
    max_nodes: int | None = None,
    context: int | None = None,
    exclude: Collection[NodeId] = (),
    native_mtp: bool = True,
) -> Placement:
    """The fastest single node that can hold the model, else the smallest set that can.

    `context` is in tokens (None: the card's, at most DEFAULT_CONTEXT); `native_mtp` is False where
    the operator turned it off, so that no memory is kept for the head. The same arguments give the
    same placement. Raises InsufficientMemory, and InvalidRequest for a bound that nothing can meet.
    """
    nodes = tuple(node for node in view.nodes if node.id not in exclude)
    if not nodes:
        raise InsufficientMemory(
            f"no live node is left to hold {card.id}; start a node or exclude fewer"
        )
    sizes = _sizes(card, len(nodes), min_nodes, max_nodes)
    wanted = _context(card, context)
    task = _Task(card, view, nodes, wanted, native_mtp and card.native_mtp is not None)
    for size in sizes:
        candidates = _singles(task) if size == 1 else _splits(task, size)
        if candidates:
            best, *others = sorted(candidates, key=lambda candidate: candidate.rank)
            return _placement(task, best, others, min_nodes)
    raise _insufficient(task, sizes, max_nodes, bool(exclude))


def _sizes(card: ModelCard, live: int, min_nodes: int, max_nodes: int | None) -> range:
    """How many stages to try, in this order."""
    if not 1 <= min_nodes <= live:
        raise InvalidRequest(
            f"min_nodes is {min_nodes} of {live} live nodes; ask for 1 to {live} or start more",
            param="min_nodes",
        )
    if min_nodes > card.num_layers:
        raise InvalidRequest(
            f"min_nodes is {min_nodes}, and {card.id} has {card.num_layers} layers to share; "
            f"ask for 1 to {card.num_layers}",
            param="min_nodes",
        )
    if max_nodes is not None and max_nodes < min_nodes:
        raise InvalidRequest(
            f"max_nodes is {max_nodes}, below min_nodes = {min_nodes}; raise it or leave it out",
            param="max_nodes",
        )
    most = live if max_nodes is None else min(live, max_nodes)
    return range(min_nodes, min(most, card.num_layers) + 1)


def _context(card: ModelCard, asked: int | None) -> int:
    if asked is None:
        return min(card.context_length, DEFAULT_CONTEXT)
    if not 1 <= asked <= card.context_length:
        raise InvalidRequest(
            f"context is {asked} tokens; {card.id} takes 1 to {card.context_length}",
            param="context",
        )
    return asked


def _singles(task: _Task) -> list[_Candidate]:
    """Every node that can hold the whole model."""
    return [
        _single(task, node)
        for node in task.nodes
        if task.fits(node, 0, task.card.num_layers, generator=True)
    ]


def _single(task: _Task, node: NodeFacts) -> _Candidate:
    stages = (StageAssignment(node.id, 0, task.card.num_layers),)
    seconds = seconds_per_token(task.card, stages, task.view)
    drafted = seconds / ASSUMED_MTP_SPEEDUP if _holds_head(task, node) else seconds
    on_disk = task.card.id in node.models
    rank = (drafted, not on_disk, -node.memory_bytes, node.id)
    return _Candidate((node,), stages, seconds, rank)


def _holds_head(task: _Task, node: NodeFacts) -> bool:
    layers = task.card.num_layers
    return task.mtp and task.fits(node, 0, layers, generator=True, mtp=True)


def _splits(task: _Task, size: int) -> list[_Candidate]:
    """The split of every set of `size` nodes that can hold the model."""
    layers = task.card.num_layers
    # The last layer needs what any may: with evenly spread caches it always holds one.
    able = [n for n in task.nodes if task.fits(n, layers - 1, layers, generator=False)]
    able.sort(key=lambda node: (-node.memory_bytes, node.id))
    sets = combinations(able[: max(size, _CANDIDATES)], size)
    return [found for chosen in sets if (found := _split(task, chosen)) is not None]


def _split(task: _Task, nodes: Iterable[NodeFacts]) -> _Candidate | None:
    """The nodes by bandwidth, the first of them that can be the generator in front.

    Finds a split where there is one, if the layers are alike; hops do not change the order yet.
    """
    order = sorted(nodes, key=lambda node: (-bandwidth_of(node), node.id))
    for generator in order:
        nodes_in_order = (generator, *(node for node in order if node is not generator))
        memory = [node.memory_bytes for node in nodes_in_order]
        ends = stage_ends(task.card, memory, task.context)
        if ends is not None:
            return _pipeline(task, nodes_in_order, ends)
    return None


def _pipeline(task: _Task, nodes: tuple[NodeFacts, ...], ends: Sequence[int]) -> _Candidate:
    stages = tuple(
        StageAssignment(node.id, first, end)
        for node, first, end in zip(nodes, (0, *ends), ends, strict=False)
    )
    seconds = seconds_per_token(task.card, stages, task.view)
    to_download = sum(task.card.id not in node.models for node in nodes)
    rank = (seconds, to_download, *(node.id for node in nodes))
    return _Candidate(nodes, stages, seconds, rank)


def _placement(
    task: _Task, best: _Candidate, others: Sequence[_Candidate], min_nodes: int
) -> Placement:
    if len(best.nodes) == 1:
        reason = _why_alone(task, best, len(others) + 1)
    else:
        reason = _why_split(task, best, min_nodes)
    return Placement(
        model=task.card.id,
        stages=best.stages,
        reason=reason,
        score=best.seconds,
        runner_up=str(others[0]) if others else None,
        context_length=task.context,
        mtp_off_reason=_mtp_off_reason(task, best),
    )


def _why_alone(task: _Task, best: _Candidate, able: int) -> str:
    if len(task.nodes) == 1:
        choice = "the only node"
    elif able == 1:
        choice = f"the only one of {len(task.nodes)} nodes with enough memory"
    else:
        choice = f"the fastest of {able} nodes with enough memory"
    no_mtp = _mtp_off_reason(task, best)
    return f"{best}: {choice} ({_need(task)})" + (f"; no native MTP: {no_mtp}" if no_mtp else "")


def _why_split(task: _Task, best: _Candidate, min_nodes: int) -> str:
    ranges = ", ".join(
        f"{node.name} layers {stage.first_layer}-{stage.end_layer - 1}"
        for node, stage in zip(best.nodes, best.stages, strict=True)
    )
    if min_nodes > 1:
        cause = f"min_nodes = {min_nodes} was asked for"
    else:
        cause = f"no node alone has enough memory ({_need(task)})"
    no_mtp = "; no native MTP: it runs only where one node holds the whole model"
    return f"{best}: {ranges}, because {cause}" + (no_mtp if task.mtp else "")


def _mtp_off_reason(task: _Task, best: _Candidate) -> str:
    if not task.mtp:
        return ""
    node, *others = best.nodes
    if others:
        return split_reason(len(best.nodes))
    if _holds_head(task, node):
        return ""
    need = stage_bytes(task.card, 0, task.card.num_layers, True, task.context, True)
    return (
        f"with the MTP head {task.card.id} needs {_gigabytes_up(need)}, and {node.name} has "
        f"{_gigabytes_down(node.memory_bytes)}; free memory there, ask for a shorter context or "
        "choose a smaller quantisation"
    )


def _insufficient(
    task: _Task, sizes: range, max_nodes: int | None, excluding: bool
) -> InsufficientMemory:
    has = ", ".join(f"{node.name} has {_gigabytes_down(node.memory_bytes)}" for node in task.nodes)
    count = "one node" if sizes[-1] == 1 else f"{sizes[-1]} nodes or fewer"
    remedies = ["free memory", "add a node", "ask for a shorter context"]
    if max_nodes is not None and max_nodes < len(task.nodes):
        remedies.append(f"raise max_nodes = {max_nodes}")
    if excluding:
        remedies.append("exclude fewer nodes")
    return InsufficientMemory(
        f"{task.card.id} needs {_need(task)}, and no set of {count} can hold it: {has}; "
        f"{', '.join(remedies)} or choose a smaller quantisation"
    )


def _need(task: _Task) -> str:
    need = stage_bytes(task.card, 0, task.card.num_layers, True, task.context, False)
    return f"{_gigabytes_up(need)} for weights, {task.context} tokens of KV and headroom"


def _gigabytes_up(count: int) -> str:
    """Rounded up, and what is available down, so that a shortage never reads as a fit."""
    return f"{-(-count // 10**7) / 100:.2f} GB"


def _gigabytes_down(count: int) -> str:
    return f"{count // 10**7 / 100:.2f} GB"
