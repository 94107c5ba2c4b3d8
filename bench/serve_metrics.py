"""Figures of a run of `bench/serve.py`, under the names of `vllm bench serve`."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from serve_client import Answer

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


@dataclass(frozen=True, slots=True)
class Run:
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


def output_tokens(answer: Answer) -> int:
    """Tokens in the server's usage; else the events with text, which are too few with drafts."""
    return answer.usage.completion_tokens if answer.usage else len(answer.chunks)


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile, interpolated between the two nearest values like numpy's default."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def figures(run: Run) -> dict[str, float | int | str | None]:
    """One row. A figure that no answer gives is None, never 0."""
    good = [answer for answer in run.answers if not answer.error]
    counts = [output_tokens(answer) for answer in good]
    read = [answer.usage.prompt_tokens for answer in good if answer.usage]
    cached = [each for answer in good if (each := _cached(answer)) is not None]
    row: dict[str, float | int | str | None] = {
        "server": run.server,
        "workload": run.workload,
        "max_concurrency": run.concurrency,
        "repeat": run.repeat,
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "refused": sum(answer.refused for answer in run.answers),
        "ended_early": sum(answer.finish_reason == "stop" for answer in good),
        "total_input_tokens": sum(read) if len(read) == len(good) else None,
        "cached_input_tokens": sum(cached) if cached else None,
        "total_output_tokens": sum(counts),
        "output_tokens_by": _counted_by(good),
        "min_output_len": min(counts, default=None),
        "max_output_len": max(counts, default=None),
        "request_throughput": len(good) / run.duration,
        "output_throughput": sum(counts) / run.duration,
        "client_cpu_share": run.client_cpu / run.duration,
    }
    for name, values in _latencies(good).items():
        row |= _spread(name, values)
    return row


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


def _spread(name: str, values: Sequence[float]) -> dict[str, float | int | str | None]:
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


def _cached(answer: Answer) -> int | None:
    return answer.usage.cached_tokens if answer.usage else None


def _counted_by(good: Sequence[Answer]) -> str:
    by_usage = sum(answer.usage is not None for answer in good)
    if not good or 0 < by_usage < len(good):
        return "both" if good else ""
    return "usage" if by_usage else "events"


def errors(runs: Sequence[Run]) -> dict[str, Counter[str]]:
    """Each server's failures by their messages."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        counts.setdefault(run.server, Counter()).update(a.error for a in run.answers if a.error)
    return counts


@dataclass(frozen=True, slots=True)
class Ratio:
    """The first server's figure over the second's, within each repeat."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


def ratios(runs: Sequence[Run], first: str, second: str) -> dict[tuple[str, int], dict[str, Ratio]]:
    """Ratios by cell and figure. A repeat in which a server completed nothing has none."""
    rows = {(run.cell, run.repeat, run.server): figures(run) for run in runs}
    ratios_by_cell: dict[tuple[str, int], dict[str, Ratio]] = {}
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


_Row = Mapping[str, float | int | str | None]


def _ratio(pairs: Sequence[tuple[_Row, _Row]], name: str) -> Ratio | None:
    values: list[float] = []
    for first, second in pairs:
        a, b = first[name], second[name]
        if isinstance(a, int | float) and isinstance(b, int | float) and a > 0 and b > 0:
            values.append(a / b)
    if not values:
        return None
    return Ratio(statistics.median(values), min(values), max(values))


def same_answers(runs: Sequence[Run], first: str, second: str) -> tuple[int, int]:
    """The number of questions that both answered, and of those with the same text."""
    texts = {(run.cell, run.repeat, run.server): run.answers for run in runs}
    both = same = 0
    for (cell, repeat, server), answers in texts.items():
        others = texts.get((cell, repeat, second), ())
        if server != first or not others:
            continue
        for a, b in zip(answers, others, strict=True):
            if not a.error and not b.error:
                both, same = both + 1, same + (a.text == b.text)
    return both, same
