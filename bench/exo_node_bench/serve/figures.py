"""Figures of a run, under the names of `vllm bench serve`."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..spread import Spread, percentile
from .answer import Answer

PERCENTILES: Final = (50, 95, 99)
RATIOS: Final = (
    "output_throughput",
    "request_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p50_itl_ms",
    "p95_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
)
"""The figures by which two servers are compared."""

Figures = Mapping[str, float | None]
"""The figures of one run by their names; None where no answer gives one, never 0."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The answers of one server to one workload at one concurrency, once."""

    server: str
    workload: str
    concurrency: int
    repeat: int
    duration: float
    client_cpu: float
    """CPU seconds of this bench in that time. Near `duration`, it measures itself."""
    answers: tuple[Answer, ...]

    @property
    def cell(self) -> tuple[str, int]:
        return self.workload, self.concurrency

    @property
    def good(self) -> list[Answer]:
        """The answers that did not fail."""
        return [answer for answer in self.answers if not answer.failure]


def output_tokens(answer: Answer) -> int:
    """Tokens in the server's usage; else the events with text, which are too few with drafts."""
    return answer.usage.completion_tokens if answer.usage else len(answer.chunks)


def figures(run: BenchRun) -> dict[str, float | None]:
    """All figures of a run."""
    good = run.good
    counts = [output_tokens(answer) for answer in good]
    read = [answer.usage.prompt_tokens for answer in good if answer.usage]
    cached = [
        answer.usage.cached_tokens
        for answer in good
        if answer.usage and answer.usage.cached_tokens is not None
    ]
    row: dict[str, float | None] = {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "refused": sum(answer.refused for answer in run.answers),
        "ended_early": sum(answer.finish_reason == "stop" for answer in good),
        "total_input_tokens": sum(read) if good and len(read) == len(good) else None,
        "cached_input_tokens": sum(cached) if cached else None,
        "total_output_tokens": sum(counts),
        "min_output_len": min(counts, default=None),
        "max_output_len": max(counts, default=None),
        "request_throughput": len(good) / run.duration,
        "output_throughput": sum(counts) / run.duration,
        "client_cpu_share": run.client_cpu / run.duration,
    }
    for name, values in _latencies(good).items():
        row |= _spread(name, values)
    return row | _drafts(good)


def _latencies(good: Sequence[Answer]) -> dict[str, list[float]]:
    """Latencies in milliseconds. As in vLLM, ITL is between events, TPOT over later tokens."""
    times = {
        "ttft": [answer.chunks[0] - answer.started for answer in good],
        "ttft_first_turn": [a.chunks[0] - a.started for a in good if a.turn == 0],
        "ttft_later_turns": [a.chunks[0] - a.started for a in good if a.turn > 0],
        "tpot": [
            (answer.chunks[-1] - answer.chunks[0]) / (tokens - 1)
            for answer in good
            if (tokens := output_tokens(answer)) > 1
        ],
        "itl": [b - a for answer in good for a, b in pairwise(answer.chunks)],
        "e2el": [answer.ended - answer.started for answer in good],
    }
    return {name: [1e3 * each for each in values] for name, values in times.items()}


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        empty = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max")
        return {f"{which}_{name}_ms": None for which in empty}
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        **{f"p{p}_{name}_ms": percentile(values, p) for p in PERCENTILES},
        f"max_{name}_ms": max(values),
    }


def _drafts(good: Sequence[Answer]) -> dict[str, float | None]:
    """Counts of drafts, and the share of them that was accepted, in per cent."""
    drafts = [answer.drafts for answer in good if answer.drafts]
    proposed = sum(each.proposed_draft_tokens for each in drafts)
    accepted = sum(each.accepted_draft_tokens for each in drafts)
    return {
        "spec_decode_num_drafts": sum(d.spec_decode_rounds for d in drafts) if drafts else None,
        "spec_decode_draft_tokens": proposed if drafts else None,
        "spec_decode_accepted_tokens": accepted if drafts else None,
        "spec_decode_acceptance_rate": 100 * accepted / proposed if proposed else None,
    }


def counted_by(good: Sequence[Answer]) -> str:
    """How the output tokens were counted: `usage`, `events` or `both`; "" without an answer."""
    by_usage = sum(answer.usage is not None for answer in good)
    if not good or 0 < by_usage < len(good):
        return "both" if good else ""
    return "usage" if by_usage else "events"


def failures(runs: Sequence[BenchRun]) -> dict[str, Counter[str]]:
    """Each server's failures by their messages, with the servers' texts."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        texts = [str(answer.failure) for answer in run.answers if answer.failure]
        counts.setdefault(run.server, Counter()).update(texts)
    return counts


def ratios(
    runs: Sequence[BenchRun], first: str, second: str
) -> dict[tuple[str, int], dict[str, Spread]]:
    """The first server's figures over the second's within each repeat, by cell and figure.

    A repeat in which a server completed nothing has none.
    """
    rows = {(run.cell, run.repeat, run.server): figures(run) for run in runs}
    ratios_by_cell: dict[tuple[str, int], dict[str, Spread]] = {}
    for cell in dict.fromkeys(run.cell for run in runs):
        repeats = sorted({repeat for c, repeat, _ in rows if c == cell})
        pairs = [
            (rows[cell, repeat, first], rows[cell, repeat, second])
            for repeat in repeats
            if (cell, repeat, first) in rows and (cell, repeat, second) in rows
        ]
        ratios_by_cell[cell] = {
            name: ratio for name in RATIOS if (ratio := _ratio(pairs, name)) is not None
        }
    return ratios_by_cell


def _ratio(pairs: Sequence[tuple[Figures, Figures]], name: str) -> Spread | None:
    """The ratios within the repeats in which both have a figure other than 0."""
    return Spread.of(a / b for x, y in pairs if (a := x[name]) and (b := y[name]))


def same_answers(runs: Sequence[BenchRun], first: str, second: str) -> tuple[int, int]:
    """The number of questions that both answered, and of those with the same text."""
    texts = {(run.cell, run.repeat, run.server): run.answers for run in runs}
    both = same = 0
    for (cell, repeat, server), answers in texts.items():
        if server != first:
            continue
        # Both begin with the same questions; the slower one may have come to fewer.
        for a, b in zip(answers, texts.get((cell, repeat, second), ()), strict=False):
            if not a.failure and not b.failure:
                both, same = both + 1, same + (a.text == b.text)
    return both, same
