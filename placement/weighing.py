"""The dtypes that a placement may compute in, the same for all of its stages, and all candidates
ranked over them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .candidates import Candidate, PlacementTask, pipelines, seconds_of, single_nodes
from .card import ModelCard
from .cluster import OWN, ClusterView, NodeFacts
from .dtype_bytes import BYTES
from .errors import InsufficientMemory
from .kv_bits import KvBits
from .options import PlanOptions, limits_of
from .reasons import manual_split, wide_dtype_reason
from .split_refusal import SplitRefusal

CHECKPOINTS = "the checkpoint's own"
"""The reason of a dtype that needs no other."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype to compute in, with the reason for a person."""

    name: str
    reason: str


def dtypes_of(card: ModelCard, nodes: Sequence[NodeFacts]) -> tuple[Dtype, ...]:
    """The dtypes in which `nodes` (the generator first) may compute: the best first, then those for
    lack of memory.

    What the generator's operator asked for, else the checkpoint's, but for what one of the nodes
    cannot run or runs far slower: on CPUs MLX multiplies gathered experts in float32 only, 4- and
    8-bit weights with 16-bit scales at a tenth of the speed of float32 scales, and other matrices
    of 16 bits at a quarter of that of exo-node's own float32 products. The GPUs of M1 and M2 have
    no bfloat16.
    """
    if (requested := nodes[0].dtype) != "auto":
        return (Dtype(requested, f"{nodes[0].name} was started with --dtype {requested}"),)
    if card.dtype == "float32":
        return (Dtype("float32", CHECKPOINTS),)
    cpu = next((node for node in nodes if node.backend == "cpu"), None)
    if cpu is not None and (why := _needs_float32(card)):
        return (Dtype("float32", f"{cpu.name} computes on a CPU, where {why}"),)
    usual = _sixteen_bits(card, nodes, cpu)
    if not all(is_fast(node) for node in nodes):
        return (usual,)
    reason = "exo-node's own products, which need float32, are far faster on such a CPU"
    return (Dtype("float32", reason), usual)


def is_fast(node: NodeFacts) -> bool:
    """Whether float32 is the node's fastest dtype, and may be chosen for it."""
    return node.backend == "cpu" and node.float32_products == OWN and node.dtype == "auto"


def needs_float32(card: ModelCard, node: NodeFacts) -> bool:
    """Whether a placement with this node must compute in float32 unless a setting overrides it."""
    return node.backend == "cpu" and bool(_needs_float32(card))


def _needs_float32(card: ModelCard) -> str:
    if card.num_experts:
        return "MLX multiplies experts in float32 only"
    return "quantised weights need float32 scales to be fast" if card.quantization else ""


def _sixteen_bits(card: ModelCard, nodes: Sequence[NodeFacts], cpu: NodeFacts | None) -> Dtype:
    old = next((n for n in nodes if n.chip.startswith(("Apple M1", "Apple M2"))), None)
    if old is not None and card.dtype == "bfloat16":
        return Dtype("float16", f"{old.name} has an {old.chip}, whose GPU has no bfloat16")
    reason = CHECKPOINTS
    if cpu is not None:
        slow = next((node for node in nodes if not is_fast(node)), None)
        if slow is not None and slow.backend != "cpu":
            reason += f"; {slow.name} has a GPU, and all stages compute in one dtype"
        elif slow is not None and slow.float32_products not in ("", OWN):
            why = slow.float32_products
            reason += f"; {slow.name} has no fast products of float32: {why}"
    return Dtype(card.dtype, reason)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of `plan`."""

    card: ModelCard
    """With the bits of `kv_bits`."""
    view: ClusterView
    options: PlanOptions
    refusal: SplitRefusal
    kv_bits: KvBits
    context: int | None = None
    """Tokens in place of those of `options`, which fit nowhere."""

    def task(self, dtype: str) -> PlacementTask:
        """The task in `dtype`. Raises InvalidRequest and InsufficientMemory as `limits_of` does."""
        view = self.view.measured_in(dtype)
        limits = limits_of(self.card, view, self.options, self.refusal)
        limits = replace(limits, context=self.context or limits.context)
        return PlacementTask(self.card.computed_in(dtype), view, limits)


@dataclass(frozen=True, slots=True)
class WeighedCandidate:
    """A candidate, the dtype that it was weighed in, and the task in that dtype."""

    task: PlacementTask
    candidate: Candidate
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Ranking:
    """All candidates, the best first."""

    choices: Sequence[WeighedCandidate]
    sets: int
    """Sets of nodes that were weighed."""
    floor: float
    """Seconds a token that no placement outside the search beats; infinite if there is none."""
    task: PlacementTask
    """The task that an error message describes if there is no candidate."""


def rank(request: PlanRequest) -> Ranking:
    """Every single node and the best pipelines, each in the dtype of its nodes.

    16 bits take the place of a faster float32 only where they need fewer nodes.
    """
    own = request.card.dtype  # of 16 bits all take the same memory
    narrow_dtype, wide_task = own if BYTES[own] == 2 else "bfloat16", request.task("float32")
    nodes = wide_task.limits.nodes
    wide = _search_dtype(request, wide_task, _float32_nodes(request, nodes))
    fast = [c for c in wide.choices if all(is_fast(node) for node in c.candidate.nodes)]
    fewest = min((len(c.candidate.nodes) for c in fast), default=math.inf)
    narrow_task = request.task(narrow_dtype)
    narrow_nodes = _narrow_nodes(request.card, narrow_task.limits.nodes)
    if all(is_fast(node) for node in nodes) and fewest < math.inf:
        most = min(narrow_task.limits.max_stages, int(fewest) - 1)
        limits = replace(narrow_task.limits, max_stages=most)
        narrow_task = replace(narrow_task, limits=limits)
    narrow = _search_dtype(request, narrow_task, narrow_nodes, fewest)
    explained = [_with_float32_reason(request, choice, wide_task) for choice in narrow.choices]
    return Ranking(
        sorted([*wide.choices, *explained], key=lambda choice: choice.candidate.rank),
        wide.sets + narrow.sets,
        min(wide.floor, narrow.floor),
        narrow_task if narrow_nodes else wide_task,
    )


def weigh_manual_split(request: PlanRequest) -> WeighedCandidate:
    """The requested split. Raises InsufficientMemory where a stage does not fit."""
    counts = [count for _, count in request.options.layers]
    nodes = request.task(request.card.dtype).limits.nodes
    *better, last = dtypes_of(request.card, nodes)
    for dtype in () if request.options.frugal else better:
        task = request.task(dtype.name)
        try:
            return WeighedCandidate(task, manual_split(task, counts), dtype)
        except InsufficientMemory:
            continue
    task = request.task(last.name)
    choice = WeighedCandidate(task, manual_split(task, counts), last)
    return _with_float32_reason(request, choice, request.task("float32"))


def _float32_nodes(request: PlanRequest, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    """The nodes that a placement in float32 may use."""
    card = request.card
    requested = any(node.dtype == "float32" for node in nodes)
    needed = any(needs_float32(card, node) for node in nodes)
    if card.dtype == "float32" or requested or needed:
        return nodes
    return [node for node in nodes if is_fast(node) and not request.options.frugal]


def _narrow_nodes(card: ModelCard, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    """The nodes that a placement in 16 bits may use."""
    if any(node.dtype not in ("auto", "float32") for node in nodes):
        return nodes
    if card.dtype == "float32" or all(node.dtype == "float32" for node in nodes):
        return ()
    return [node for node in nodes if not needs_float32(card, node)]


def _search_dtype(
    request: PlanRequest, task: PlacementTask, nodes: Sequence[NodeFacts], fewest: float = math.inf
) -> Ranking:
    """The candidates on `nodes` that compute in a dtype of the task's size.

    Leaves out those that float32 outdoes; a placement in float32 needs `fewest` nodes.
    """
    limits, card, size = task.limits, request.card, BYTES[task.card.dtype]
    complete = len(nodes) == len(limits.nodes)
    too_few = len(nodes) < limits.min_stages or limits.max_stages < limits.min_stages
    if too_few or (limits.pinned and not complete):
        return Ranking((), 0, math.inf, task)

    def dtypes(candidate: Candidate) -> list[Dtype]:
        outdone = _is_outdone(card, candidate, fewest)
        usable = () if outdone else dtypes_of(card, candidate.nodes)
        return [dtype for dtype in usable if BYTES[dtype.name] == size]

    most = min(limits.max_stages, len(nodes))
    part = replace(task, limits=replace(limits, nodes=tuple(nodes), max_stages=most))
    candidates = single_nodes(part) if limits.min_stages == 1 else []
    candidates = [single for single in candidates if dtypes(single)]
    sets, floor = len(candidates), math.inf
    if part.limits.max_stages > 1:
        split, result = pipelines(part, candidates)
        candidates += split
        sets, floor = sets + result.sets, seconds_of(result.floor)
    choices = [WeighedCandidate(task, each, dtype) for each in candidates for dtype in dtypes(each)]
    return Ranking(choices, sets, floor, task)


def _is_outdone(card: ModelCard, candidate: Candidate, fewest: float) -> bool:
    """Whether float32 is as good for it: it is faster, and needs no more nodes."""
    better = dtypes_of(card, candidate.nodes)[0].name == "float32"
    return better and fewest <= len(candidate.nodes)


def _with_float32_reason(
    request: PlanRequest, choice: WeighedCandidate, wide_task: PlacementTask
) -> WeighedCandidate:
    """`choice` with the reason why it is not in float32, where that would be faster."""
    better = dtypes_of(request.card, choice.candidate.nodes)[0]
    if better.name == choice.dtype.name or better.name != "float32":
        return choice
    reason = "another model needs the room of float32"
    if not request.options.frugal:
        reason = wide_dtype_reason(wide_task, choice.candidate)
    dtype = replace(choice.dtype, reason=f"{choice.dtype.reason}; {reason}")
    return replace(choice, dtype=dtype)
