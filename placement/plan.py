"""Chooses the nodes of a model, and tells a person why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .candidates import Task, assigned
from .card import ModelCard
from .chunk import MOST, prefill_chunk
from .cluster import ClusterView, StageAssignment
from .context import context_reason, longest_context
from .cost import ASSUMED_MTP_SPEEDUP, seconds_per_token, stage_bytes
from .dtype import CHECKPOINTS
from .ids import ModelId
from .options import ANY, DEFAULT_CONTEXT, PlanOptions, allowed
from .reasons import drafting_reason, insufficient, mtp_off_reason, why
from .split_refusal import MAY_BE_SPLIT, SplitRefusal
from .weighing import Choice, Request, weigh, weigh_by_hand

__all__ = [
    "ASSUMED_MTP_SPEEDUP",
    "DEFAULT_CONTEXT",
    "Placement",
    "PlanOptions",
    "Preview",
    "StageAssignment",
    "plan",
    "planned_bytes",
    "preview",
    "seconds_now",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs. The first stage is the generator."""

    model: ModelId
    stages: tuple[StageAssignment, ...]
    reason: str
    """For a person: why these nodes, and why no MTP where there is none."""
    score: float
    """Seconds a token, predicted for one request; with native MTP where it runs."""
    runner_up: str | None
    """The best choice of other nodes, for a person."""
    context_length: int
    """Tokens of KV that there is room for."""
    mtp_off_reason: str
    """Why the generator must not load a head that the card declares; empty where it may."""
    dtype: str
    """That every stage computes in."""
    dtype_reason: str
    """Why that one, for a person."""
    prefill_chunk: int = MOST
    """Rows of a prompt in one forward."""
    bound: float = 0.0
    """Seconds a token that no allowed placement can beat; `score` itself where that is proven."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What `plan` would do, and what it weighed."""

    best: Placement
    runner_up: Placement | None
    """The best choice of other nodes; with a split by hand, what would be planned instead."""
    bound_s: float
    """As `Placement.bound`."""
    candidates_considered: int
    """Sets of nodes that were weighed; the rest was ruled out by a bound."""
    drafting: str
    """Why the model will draft there, or why not."""


def plan(
    card: ModelCard,
    view: ClusterView,
    options: PlanOptions = ANY,
    *,
    native_mtp: bool = True,
    pipeline_refusal: SplitRefusal = MAY_BE_SPLIT,
) -> Placement:
    """The placement that answers one request the fastest.

    Exact for the costs of `cost.py`, for up to 16 nodes that matter and layers alike; where it
    cannot be, `bound` says how far off it may be. `native_mtp` is False where the operator turned
    it off, so that no memory is kept for the head; `pipeline_refusal` says where this model must
    not be split. The same arguments give the same placement. Raises InsufficientMemory, and
    InvalidRequest for what nothing can meet.
    """
    return preview(
        card, view, options, native_mtp=native_mtp, pipeline_refusal=pipeline_refusal
    ).best


def planned_bytes(card: ModelCard, placement: Placement, number: int) -> int:
    """What stage `number` takes of its node, with its context and the planner's headroom."""
    stage, context = placement.stages[number], placement.context_length
    mtp, card = not placement.mtp_off_reason, card.computed_in(placement.dtype)
    return stage_bytes(card, stage.first_layer, stage.end_layer, number == 0, context, mtp)


def seconds_now(
    card: ModelCard, view: ClusterView, stages: Sequence[StageAssignment], dtype: str
) -> float:
    """Seconds a token of stages that are loaded, as in `Placement.score`.

    Raises KeyError for a node that is not in the view.
    """
    card, view = card.computed_in(dtype), view.measured_in(dtype)
    if len(stages) > 1:
        return seconds_per_token(card, stages, view)
    task = Task(card, view, allowed(card, view, ANY, MAY_BE_SPLIT), card.native_mtp is not None)
    return assigned(task, (view.node(stages[0].node),), [card.num_layers]).seconds


def preview(
    card: ModelCard,
    view: ClusterView,
    options: PlanOptions = ANY,
    *,
    native_mtp: bool = True,
    pipeline_refusal: SplitRefusal = MAY_BE_SPLIT,
) -> Preview:
    """As `plan`, with the next best choice beside it."""
    mtp = native_mtp and card.native_mtp is not None
    asked = Request(card, view, options, pipeline_refusal, mtp)
    by_hand = weigh_by_hand(asked) if options.layers else None
    weighed = weigh(asked if by_hand is None else replace(asked, options=_free(options)))
    ranked = [*weighed.choices]
    if by_hand is not None:
        stages = by_hand.candidate.stages
        ranked = [by_hand, *(other for other in ranked if other.candidate.stages != stages)]
    if not ranked:
        raise insufficient(weighed.task, options, pipeline_refusal)
    best, *others = ranked
    bound = min(weighed.floor, *(choice.candidate.seconds for choice in ranked))
    runner_up = None
    if others:
        runner_up = _placement(options, others[0], str(others[0].candidate), None, bound)
    words = _words(best, ranked, bound, options, pipeline_refusal)
    return Preview(
        best=_placement(options, best, words, runner_up and runner_up.reason, bound),
        runner_up=runner_up,
        bound_s=bound,
        candidates_considered=weighed.sets,
        drafting=drafting_reason(best.task, best.candidate, native_mtp=native_mtp),
    )


def _words(
    best: Choice,
    ranked: Sequence[Choice],
    bound: float,
    options: PlanOptions,
    refusal: SplitRefusal,
) -> str:
    candidates = [choice.candidate for choice in ranked]
    words = why(best.task, best.candidate, candidates, bound, options, refusal)
    if context := context_reason(best.task, best.candidate, options):
        words += f"; {context}"
    if best.dtype.reason != CHECKPOINTS:
        words += f"; computes in {best.dtype.name}: {best.dtype.reason}"
    return words


def _free(options: PlanOptions) -> PlanOptions:
    """What the planner may choose from in place of a split by hand."""
    return replace(options, layers=(), nodes=())


def _placement(
    options: PlanOptions, choice: Choice, reason: str, runner_up: str | None, bound: float
) -> Placement:
    task, candidate = choice.task, choice.candidate
    context, mtp = longest_context(task, candidate, options), candidate.speedup > 0
    return Placement(
        model=task.card.id,
        stages=candidate.stages,
        reason=reason,
        score=candidate.seconds,
        runner_up=runner_up,
        context_length=context,
        mtp_off_reason=mtp_off_reason(task, candidate),
        dtype=choice.dtype.name,
        dtype_reason=choice.dtype.reason,
        prefill_chunk=prefill_chunk(task.card, candidate.nodes, candidate.stages, context, mtp=mtp),
        bound=bound,
    )
