"""The placements that come into question, in every dtype that they may compute in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .candidates import Candidate, Task, pipelines, seconds_of, singles
from .card import ModelCard
from .cluster import ClusterView, NodeFacts
from .dtype import Dtype, dtypes_of, is_fast, needs_float32
from .dtype_bytes import BYTES
from .errors import InsufficientMemory
from .options import Allowed, PlanOptions, allowed
from .reasons import split_by_hand, too_wide
from .split_refusal import SplitRefusal


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be weighed; the arguments of `plan`."""

    card: ModelCard
    view: ClusterView
    options: PlanOptions
    refusal: SplitRefusal
    mtp: bool
    """The card declares a head, and the operator lets it draft."""

    def task(self, dtype: str, options: PlanOptions | None = None) -> Task:
        """Raises InvalidRequest and InsufficientMemory as `allowed` does."""
        view = self.view.measured_in(dtype)
        bounds = allowed(self.card, view, options or self.options, self.refusal)
        return Task(self.card.computed_in(dtype), view, bounds, self.mtp)


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and the dtype that it was weighed in. `task` is of that dtype."""

    task: Task
    candidate: Candidate
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Weighed:
    """All that was found, the best first."""

    choices: Sequence[Choice]
    sets: int
    """Of nodes that were weighed."""
    floor: float
    """Seconds a token that what was not weighed takes at least."""
    task: Task
    """By which to say what is missing where nothing was found."""


def weigh(asked: Request) -> Weighed:
    """Every single node and the best pipelines, each in the dtype of its nodes.

    16 bits take the place of a faster float32 only where they need fewer nodes.
    """
    usual, full = sixteen_bits(asked.card), asked.task("float32")
    nodes = full.allowed.nodes
    wide = _searched(asked, full, _in_float32(asked, nodes))
    fast = [c for c in wide.choices if all(is_fast(node) for node in c.candidate.nodes)]
    fewest = min((len(c.candidate.nodes) for c in fast), default=math.inf)
    task, narrow_nodes = asked.task(usual), _in_sixteen_bits(asked.card, nodes)
    if all(is_fast(node) for node in nodes) and fewest < math.inf:
        most = min(task.allowed.most, int(fewest) - 1)
        task = replace(task, allowed=replace(task.allowed, most=most))
    narrow = _searched(asked, task, narrow_nodes)
    kept = [c for c in narrow.choices if not _outdone(asked.card, c.candidate, fewest)]
    told = [_told(asked, choice, full) for choice in kept]
    return Weighed(
        sorted([*wide.choices, *told], key=lambda choice: choice.candidate.rank),
        wide.sets + narrow.sets,
        min(wide.floor, narrow.floor),
        task if narrow_nodes else full,
    )


def weigh_by_hand(asked: Request) -> Choice:
    """The split that was asked for. Raises InsufficientMemory where a stage does not fit."""
    counts = [count for _, count in asked.options.layers]
    nodes = asked.task(asked.card.dtype).allowed.nodes
    *better, last = dtypes_of(asked.card, nodes)
    for dtype in () if asked.options.frugal else better:
        task = asked.task(dtype.name)
        try:
            return Choice(task, split_by_hand(task, counts), dtype)
        except InsufficientMemory:
            continue
    task = asked.task(last.name)
    choice = Choice(task, split_by_hand(task, counts), last)
    return _told(asked, choice, asked.task("float32"))


def sixteen_bits(card: ModelCard) -> str:
    """The dtype by which 16 bits are weighed; all of them take the same memory."""
    return card.dtype if BYTES[card.dtype] == 2 else "bfloat16"


def _in_float32(request: Request, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    """Of the nodes, those that a placement in float32 may have."""
    card = request.card
    asked = any(node.dtype == "float32" for node in nodes)
    needed = any(needs_float32(card, node) for node in nodes)
    if card.dtype == "float32" or asked or needed:
        return nodes
    return [node for node in nodes if is_fast(node) and not request.options.frugal]


def _in_sixteen_bits(card: ModelCard, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    if any(node.dtype not in ("auto", "float32") for node in nodes):
        return nodes
    if card.dtype == "float32" or all(node.dtype == "float32" for node in nodes):
        return ()
    return [node for node in nodes if not needs_float32(card, node)]


def _searched(asked: Request, task: Task, nodes: Sequence[NodeFacts]) -> Weighed:
    bounds = task.allowed
    every = len(nodes) == len(bounds.nodes)
    if len(nodes) < bounds.least or bounds.most < bounds.least or (bounds.pinned and not every):
        return Weighed((), 0, math.inf, task)
    search = replace(task, allowed=_among(bounds, nodes))
    found = singles(search) if bounds.least == 1 else []
    sets, floor = len(found), math.inf
    if search.allowed.most > 1:
        split, outcome = pipelines(search, found)
        found += split
        sets, floor = sets + outcome.sets, seconds_of(outcome.floor)
    size = BYTES[task.card.dtype]
    choices = [
        Choice(task, candidate, dtype)
        for candidate in found
        for dtype in dtypes_of(asked.card, candidate.nodes)
        if BYTES[dtype.name] == size
    ]
    return Weighed(choices, sets, floor, task)


def _among(bounds: Allowed, nodes: Sequence[NodeFacts]) -> Allowed:
    return replace(bounds, nodes=tuple(nodes), most=min(bounds.most, len(nodes)))


def _outdone(card: ModelCard, candidate: Candidate, fewest: float) -> bool:
    """Whether float32 is as good for it: it is faster, and needs no more nodes."""
    better = dtypes_of(card, candidate.nodes)[0].name == "float32"
    return better and fewest <= len(candidate.nodes)


def _told(asked: Request, choice: Choice, wide: Task) -> Choice:
    """`choice` with the reason why it is not in float32, where that would be faster."""
    better = dtypes_of(asked.card, choice.candidate.nodes)[0]
    if better.name == choice.dtype.name or better.name != "float32":
        return choice
    why = "another model needs the room of float32"
    if not asked.options.frugal:
        why = too_wide(wide, choice.candidate)
    reason = f"{choice.dtype.reason}; {why}"
    return replace(choice, dtype=replace(choice.dtype, reason=reason))
