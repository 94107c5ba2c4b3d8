"""Summarises a sweep's raw runs: rates, acceptance, break-even; pure arithmetic."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

from ..spread import Spread, quotient

OFF = "K=0"
MLX_LM = "mlx-lm"
ADAPTIVE = "adaptive"

LOOKUP = "lookup"
BOTH = "both"

ArmKind = Literal["mlx-lm", "off", "fixed", "adaptive", "lookup", "both"]
"""`lookup`: copied drafts alone. `both`: copied drafts, else adaptive ones of the head."""
DRAFTING: Final[frozenset[ArmKind]] = frozenset({"fixed", "adaptive", "lookup", "both"})


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode. `k` is the most drafts of the head in a round."""

    name: str
    kind: ArmKind
    k: int


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One answer: `arm` on prompt number `prompt` in repeat `repeat`.

    Rates are the `tokens` after the first one over the `decode_s` since it; `ttft_s` is the time to
    the first. `draft_k_histogram[k]` counts the forwards after the prompt's that verified k drafts.
    `same_ids`: whether the ids equal those of K=0 in this repeat; None if ids are sampled.
    """

    repeat: int
    arm: str
    prompt: int
    tokens: int
    ttft_s: float
    decode_s: float
    finish: str
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    draft_k_histogram: tuple[int, ...] = ()
    same_ids: bool | None = None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One row of the report. Figures that an arm does not have are None, as drafts of mlx-lm.

    `tok_s` pools the prompts (tokens over seconds), `mean_tok_s` is the mean of their rates.
    `acceptance_per_position[j]` is accepted over proposed drafts number j + 1. A round of
    `tokens_per_round` tokens takes as long as `break_even_tokens` plain steps: it pays if it emits
    more than that. `verify_steps` and `draft_steps` are the costs of a verify and its drafts alone,
    each evaluated by itself, in plain steps.
    """

    arm: str
    kind: ArmKind
    k: int
    tok_s: Spread | None
    mean_tok_s: Spread | None
    vs_off: Spread | None
    vs_mlx_lm: Spread | None
    ttft_s: Spread | None
    ttft_vs_off: Spread | None
    tokens: int
    same_ids: int | None
    rounds: int | None
    proposed: int | None
    accepted: int | None
    acceptance: float | None
    accepted_of_emitted: float | None
    acceptance_per_position: tuple[float, ...]
    draft_k_histogram: tuple[int, ...]
    tokens_per_round: float | None
    break_even_tokens: float | None
    verify_steps: float | None
    draft_steps: float | None


@dataclass(frozen=True, slots=True)
class CategorySummary:
    """One arm on the prompts of one category."""

    category: str
    prompts: int
    arm: str
    vs_off: Spread | None
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a plain step, and costs in plain steps: `verify[k]` of k + 1 rows, `draft[k]`."""

    plain_s: float
    verify: tuple[float, ...]
    draft: tuple[float, ...]


def summarise(
    arms: Sequence[Arm], runs: Sequence[TimedRun], costs: StepCosts | None
) -> tuple[ArmSummary, ...]:
    """One row for each arm, in the arms' order; `costs` None: none were measured."""
    by_arm = {arm.name: [run for run in runs if run.arm == arm.name] for arm in arms}
    return tuple(_arm_summary(arm, by_arm, costs) for arm in arms)


def summarise_categories(
    arms: Sequence[Arm], runs: Sequence[TimedRun], categories: Sequence[str]
) -> tuple[CategorySummary, ...]:
    """Summaries by category; `categories[i]` is that of prompt i. Empty if there is only one."""
    if len(set(categories)) < 2:
        return ()
    return tuple(
        _category_summary(category, arm, runs, categories)
        for category in dict.fromkeys(categories)
        for arm in arms
        if arm.kind in DRAFTING
    )


def _arm_summary(
    arm: Arm, by_arm: dict[str, list[TimedRun]], costs: StepCosts | None
) -> ArmSummary:
    runs = by_arm[arm.name]
    drafting = arm.kind in DRAFTING
    vs_off = _ratio(_rate, runs, by_arm[OFF])
    per_round = _tokens_per_round(runs) if arm.kind != "mlx-lm" else None
    fixed = costs if arm.kind == "fixed" else None
    histogram = _sums(run.draft_k_histogram for run in runs)
    return ArmSummary(
        arm=arm.name,
        kind=arm.kind,
        k=arm.k,
        tok_s=_spread(_rate, runs),
        mean_tok_s=_spread(_mean_rate, runs),
        vs_off=vs_off,
        vs_mlx_lm=_ratio(_rate, runs, by_arm[MLX_LM]) if MLX_LM in by_arm else None,
        ttft_s=_spread(_mean_ttft, runs),
        ttft_vs_off=_ratio(_mean_ttft, runs, by_arm[OFF]),
        tokens=sum(run.tokens for run in runs),
        same_ids=_same_ids(runs),
        rounds=sum(run.rounds for run in runs) if drafting else None,
        proposed=sum(run.proposed for run in runs) if drafting else None,
        accepted=sum(run.accepted for run in runs) if drafting else None,
        acceptance=_acceptance(runs),
        accepted_of_emitted=(
            quotient(sum(run.accepted for run in runs), sum(run.tokens for run in runs))
            if drafting
            else None
        ),
        acceptance_per_position=_per_position(runs, histogram),
        draft_k_histogram=histogram,
        tokens_per_round=per_round,
        break_even_tokens=(
            per_round / vs_off.median if drafting and per_round and vs_off else None
        ),
        verify_steps=fixed.verify[arm.k] if fixed else None,
        draft_steps=fixed.draft[arm.k] if fixed else None,
    )


def _category_summary(
    category: str, arm: Arm, runs: Sequence[TimedRun], categories: Sequence[str]
) -> CategorySummary:
    chosen = [run for run in runs if categories[run.prompt] == category]
    ours = [run for run in chosen if run.arm == arm.name]
    return CategorySummary(
        category=category,
        prompts=sum(each == category for each in categories),
        arm=arm.name,
        vs_off=_ratio(_rate, ours, [run for run in chosen if run.arm == OFF]),
        acceptance=_acceptance(ours),
    )


Figure = Callable[[Sequence[TimedRun]], float | None]


def _by_repeat(runs: Sequence[TimedRun]) -> list[list[TimedRun]]:
    repeats = sorted({run.repeat for run in runs})
    return [[run for run in runs if run.repeat == repeat] for repeat in repeats]


def _spread(figure: Figure, runs: Sequence[TimedRun]) -> Spread | None:
    return Spread.of(figure(repeat) for repeat in _by_repeat(runs))


def _ratio(figure: Figure, runs: Sequence[TimedRun], base: Sequence[TimedRun]) -> Spread | None:
    """The spread of the ratio within each repeat."""
    return Spread.of_ratios(map(figure, _by_repeat(runs)), map(figure, _by_repeat(base)))


def _rate(runs: Sequence[TimedRun]) -> float | None:
    seconds = sum(run.decode_s for run in runs)
    return sum(run.tokens - 1 for run in runs) / seconds if seconds > 0 else None


def _mean_rate(runs: Sequence[TimedRun]) -> float | None:
    rates = [(run.tokens - 1) / run.decode_s for run in runs if run.decode_s > 0]
    return statistics.mean(rates) if rates else None


def _mean_ttft(runs: Sequence[TimedRun]) -> float | None:
    return statistics.mean(run.ttft_s for run in runs) if runs else None


def _tokens_per_round(runs: Sequence[TimedRun]) -> float | None:
    """Tokens per forward after the prompt's; an end inside a block cuts its round's tokens."""
    forwards = sum(sum(run.draft_k_histogram) for run in runs)
    return sum(run.tokens - 1 for run in runs) / forwards if forwards else None


def _acceptance(runs: Sequence[TimedRun]) -> float | None:
    return quotient(sum(run.accepted for run in runs), sum(run.proposed for run in runs))


def _per_position(runs: Sequence[TimedRun], histogram: Sequence[int]) -> tuple[float, ...]:
    accepted = _sums(run.accepted_per_position for run in runs)
    proposed = [sum(histogram[j + 1 :]) for j in range(len(accepted))]
    return tuple(a / n for a, n in zip(accepted, proposed, strict=True) if n)


def _same_ids(runs: Sequence[TimedRun]) -> int | None:
    """The number of prompts whose ids were those of K=0 in every repeat."""
    if any(run.same_ids is None for run in runs):
        return None
    different = {run.prompt for run in runs if not run.same_ids}
    return len({run.prompt for run in runs} - different)


def _sums(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))
