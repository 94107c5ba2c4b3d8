"""Chooses the nodes of a model, with the reason for a person."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .candidates import PlacementTask, candidate
from .card import ModelCard
from .chunk import MOST, chunk_limit, prefill_chunk, prefill_seconds
from .cluster import ClusterView, StageAssignment
from .context import LEAST, context_reason, fitting_context, longest_context
from .cost import ModelSizes, layer_seconds, seconds_per_token
from .errors import InsufficientMemory
from .ids import ModelId
from .kv_bits import UNQUANTISED, KvBits, cached_in, choose_kv_bits
from .options import ANY, PlanOptions, limits_of, usual_context
from .reasons import (
    caches_reason,
    choice_reason,
    drafting_reason,
    insufficient_memory,
    mtp_off_reason,
    with_context,
)
from .split_refusal import EMBEDDER, MAY_BE_SPLIT, SplitRefusal
from .weighing import CHECKPOINTS, PlanRequest, Ranking, WeighedCandidate, rank, weigh_manual_split

_PREFILL_GAIN = 16
"""A row of a prompt takes at most that part of a decoded one, where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages of a model on their nodes. The first stage is the generator."""

    model: ModelId
    stages: tuple[StageAssignment, ...]
    reason: str
    """Why these nodes, and why no MTP where there is none; for a person."""
    score: float
    """Predicted seconds a token of one request, with native MTP where it runs."""
    runner_up: str | None
    """The best placement on other nodes, for a person."""
    context_length: int
    """Tokens of KV that there is room for."""
    mtp_off_reason: str
    """Why the generator must not load a head that the card declares; empty where it may."""
    dtype: str
    """The dtype that every stage computes in."""
    dtype_reason: str
    """Why that dtype, for a person."""
    kv_bits: KvBits = UNQUANTISED
    """The bits of attention's caches on every stage."""
    prefill_chunk: int = MOST
    """Rows of a prompt in one forward."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The placement that `plan` would choose, and its alternatives."""

    best: Placement
    runner_up: Placement | None
    """The best placement on other nodes; beside a manual split, the planner's own choice."""
    bound_s: float
    """Seconds a token that no allowed placement beats; `best.score` itself where this is proven."""
    candidates_considered: int
    """Sets of nodes that were weighed; the others were ruled out by a bound."""
    drafting: str
    """Why the model will or will not draft there."""


def plan(
    card: ModelCard,
    view: ClusterView,
    options: PlanOptions = ANY,
    pipeline_refusal: SplitRefusal = MAY_BE_SPLIT,
) -> Placement:
    """The best placement of `preview`, which has the same arguments and errors."""
    return preview(card, view, options, pipeline_refusal).best


def loaded_card(card: ModelCard, placement: Placement) -> ModelCard:
    """The card of what is in memory where the placement is loaded."""
    return cached_in(card, placement.kv_bits.bits).computed_in(placement.dtype)


def planned_bytes(card: ModelCard, placement: Placement, number: int) -> int:
    """Bytes of its node that stage `number` takes, with its context and the planner's headroom."""
    stage, context = placement.stages[number], placement.context_length
    sizes = ModelSizes.of(loaded_card(card, placement), context)
    mtp = not placement.mtp_off_reason
    return sizes.need(stage.first_layer, stage.end_layer, generator=number == 0, mtp=mtp)


def seconds_now(
    card: ModelCard, view: ClusterView, stages: Sequence[StageAssignment], dtype: str
) -> float:
    """Seconds a token of loaded stages, comparable with `Placement.score`.

    Raises KeyError for a node that is not in the view.
    """
    card, view = card.computed_in(dtype), view.measured_in(dtype)
    if len(stages) > 1:
        return seconds_per_token(card, stages, view)
    limits = limits_of(card, view, ANY, MAY_BE_SPLIT)
    task = PlacementTask(card, view, limits)
    return candidate(task, (view.node(stages[0].node),), [card.num_layers]).seconds


def prompt_seconds(
    card: ModelCard, view: ClusterView, stages: Sequence[StageAssignment], dtype: str
) -> float:
    """Seconds a row of a prompt on loaded stages. Those without a measurement are estimated.

    Raises KeyError for a node that is not in the view.
    """
    card, view = card.computed_in(dtype), view.measured_in(dtype)
    seconds = 0.0
    for stage in stages:
        node, count = view.node(stage.node), stage.end_layer - stage.first_layer
        row_s = prefill_seconds(card, node, MOST) / MOST
        seconds += count * (row_s or layer_seconds(card, node) / _PREFILL_GAIN)
    return seconds


def preview(
    card: ModelCard,
    view: ClusterView,
    options: PlanOptions = ANY,
    pipeline_refusal: SplitRefusal = MAY_BE_SPLIT,
) -> Preview:
    """The placement that answers one request the fastest, by the costs of `cost.py`.

    Exact for up to `search.EXACT_NODES` nodes; of more, a pipeline takes the fastest (`search.py`),
    and `bound_s` bounds how much faster another might be. `pipeline_refusal`: where this model
    must not be split. The same arguments give the same placement. Raises InsufficientMemory, and
    InvalidRequest for options that cannot be met.
    """
    pipeline_refusal = EMBEDDER if card.embeds else pipeline_refusal
    kv_bits = choose_kv_bits(card, view, options.kv_bits)
    card = cached_in(card, kv_bits.bits)
    request = PlanRequest(card, view, options, pipeline_refusal, kv_bits)
    try:
        return _preview(request)
    except InsufficientMemory as fault:
        context = _fitting_context(request)
        if options.context is not None or not options.shorten:
            raise with_context(fault, context) from None
    shortened = max(context, min(LEAST, usual_context(card)))
    try:
        return _preview(replace(request, context=shortened))
    except InsufficientMemory as fault:
        raise with_context(fault, context) from None


def _fitting_context(request: PlanRequest) -> int:
    """The longest context below the one that fits nowhere, or 0.

    Where a head may draft, it is not given up for a longer context, down to LEAST.
    """

    def fits(tokens: int, *, drafting: bool = False) -> bool:
        try:
            ranked, _ = _ranked(replace(request, context=tokens))
        except InsufficientMemory:
            return False
        return any(choice.candidate.speedup for choice in ranked) if drafting else True

    below = request.options.context or usual_context(request.card)
    if request.card.drafts is not None:
        context = fitting_context(below, lambda tokens: fits(tokens, drafting=True))
        if context >= LEAST:
            return context
    return fitting_context(below, fits)


def _ranked(request: PlanRequest) -> tuple[list[WeighedCandidate], Ranking]:
    """All choices, the best first; a manual split before them. Raises InsufficientMemory."""
    options = request.options
    manual = weigh_manual_split(request) if options.layers else None
    free = options if manual is None else replace(options, layers=(), nodes=())
    ranking = rank(replace(request, options=free))
    ranked = [*ranking.choices]
    if manual is not None:
        stages = manual.candidate.stages
        ranked = [manual, *(other for other in ranked if other.candidate.stages != stages)]
    if not ranked:
        raise insufficient_memory(ranking.task, options, request.refusal)
    return ranked, ranking


def _preview(request: PlanRequest) -> Preview:
    ranked, ranking = _ranked(request)
    best, *others = ranked
    bound = min(ranking.floor, *(choice.candidate.seconds for choice in ranked))
    runner_up = None
    if others:
        runner_up = _placement(request, others[0], str(others[0].candidate), None)
    reason = _reason(best, ranked, ranking.floor, request)
    return Preview(
        best=_placement(request, best, reason, runner_up and runner_up.reason),
        runner_up=runner_up,
        bound_s=bound,
        candidates_considered=ranking.sets,
        drafting=drafting_reason(best.task, best.candidate),
    )


def _reason(
    best: WeighedCandidate, ranked: Sequence[WeighedCandidate], floor: float, request: PlanRequest
) -> str:
    options, candidates = request.options, [choice.candidate for choice in ranked]
    reason = choice_reason(best.task, best.candidate, candidates, floor, options, request.refusal)
    if context := context_reason(best.task, best.candidate, options):
        reason += f"; {context}"
    if caches := caches_reason(best.task.card, request.kv_bits):
        reason += f"; {caches}"
    if limit := chunk_limit(best.candidate.nodes):
        reason += f"; {limit}"
    if best.dtype.reason != CHECKPOINTS:
        reason += f"; computes in {best.dtype.name}: {best.dtype.reason}"
    return reason


def _placement(
    request: PlanRequest, choice: WeighedCandidate, reason: str, runner_up: str | None
) -> Placement:
    task, chosen = choice.task, choice.candidate
    return Placement(
        model=task.card.id,
        stages=chosen.stages,
        reason=reason,
        score=chosen.seconds,
        runner_up=runner_up,
        context_length=longest_context(task, chosen, request.options),
        mtp_off_reason=mtp_off_reason(task, chosen),
        dtype=choice.dtype.name,
        dtype_reason=choice.dtype.reason,
        kv_bits=request.kv_bits,
        prefill_chunk=prefill_chunk(task.card, chosen.nodes),
    )
