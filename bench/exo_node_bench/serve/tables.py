"""The tables of a result: medians over the repeats with their spread, for terminal and page."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .result import RatioResult, Result, RunResult

NOTHING: Final = "-"
_COLUMNS: Final = (
    ("tokens/s", "output_throughput"),
    ("TTFT", "median_ttft_ms"),
    ("TTFT p95", "p95_ttft_ms"),
    ("ITL", "median_itl_ms"),
    ("ITL p99", "p99_itl_ms"),
    ("TPOT", "mean_tpot_ms"),
    ("accepted", "spec_decode_acceptance_rate"),
)
"""Headings, and the names of the figures below them."""
_RATIOS: Final = (
    ("tokens/s", "output_throughput"),
    ("TTFT", "mean_ttft_ms"),
    ("TPOT", "mean_tpot_ms"),
    ("ITL", "p50_itl_ms"),
    ("ITL p99", "p99_itl_ms"),
    ("end to end", "mean_e2el_ms"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure's text; the least and most of the repeats; its share of the column's largest."""

    text: str
    spread: str = ""
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.spread})" if self.spread else self.text


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title; rows of a comparison have a server each."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def workload_tables(result: Result) -> Iterator[Table]:
    """A table for each workload: a row for each number of clients and server."""
    several = len(result.servers) > 1
    for workload in dict.fromkeys(run.workload for run in result.runs):
        cells = _cells(result, workload)
        fastest = max(_median(repeats, "output_throughput") or 0 for repeats in cells)
        headings = [heading for heading, _ in _COLUMNS]
        first = ("clients", "server") if several else ("clients",)
        header = (*first, headings[0], "per client", *headings[1:], "answers")
        rows = tuple(_row(repeats, several, fastest) for repeats in cells)
        yield Table(workload, header, rows)


def ratio_tables(result: Result) -> Iterator[Table]:
    """A table for each further server: the first one's figures over its own."""
    for other in dict.fromkeys(ratio.other for ratio in result.ratios):
        of_other = [ratio for ratio in result.ratios if ratio.other == other]
        cells = dict.fromkeys((ratio.workload, ratio.max_concurrency) for ratio in of_other)
        rows = tuple(
            (Cell(workload), Cell(str(clients)), *_ratio_cells(of_other, workload, clients))
            for workload, clients in cells
        )
        title = f"{result.servers[0].name} / {other}"
        yield Table(title, ("workload", "clients", *(name for name, _ in _RATIOS)), rows)


def _ratio_cells(ratios: Sequence[RatioResult], workload: str, clients: int) -> Iterator[Cell]:
    of_cell = {
        ratio.figure: ratio
        for ratio in ratios
        if (ratio.workload, ratio.max_concurrency) == (workload, clients)
    }
    for _, name in _RATIOS:
        if ratio := of_cell.get(name):
            spread = f"{ratio.least:.2f}-{ratio.most:.2f}" if ratio.least < ratio.most else ""
            yield Cell(f"{ratio.median:.2f}", spread)
        else:
            yield Cell(NOTHING)


def _cells(result: Result, workload: str) -> list[list[RunResult]]:
    """The repeats of each number of clients and server, in the order of --server."""
    place = {server.name: number for number, server in enumerate(result.servers)}
    runs = [run for run in result.runs if run.workload == workload]
    cells: dict[tuple[int, str], list[RunResult]] = {}
    for run in sorted(runs, key=lambda run: (run.max_concurrency, place[run.server])):
        cells.setdefault((run.max_concurrency, run.server), []).append(run)
    return list(cells.values())


def _row(repeats: Sequence[RunResult], several: bool, fastest: float) -> tuple[Cell, ...]:
    clients = repeats[0].max_concurrency
    server = (Cell(repeats[0].server),) if several else ()
    throughput, *others = (_figure(repeats, name) for _, name in _COLUMNS)
    median = _median(repeats, "output_throughput") or 0.0
    total = Cell(throughput.text, throughput.spread, median / fastest if fastest else None)
    share = Cell(number(median / clients))
    completed = sum(int(run.figures["completed"] or 0) for run in repeats)
    failed = sum(int(run.figures["failed"] or 0) for run in repeats)
    answers = Cell(f"{completed}, {failed} failed" if failed else str(completed))
    return (Cell(str(clients)), *server, total, share, *others, answers)


def _figure(repeats: Sequence[RunResult], name: str) -> Cell:
    values = _values(repeats, name)
    if not values:
        return Cell(NOTHING)
    unit = " %" if name == "spec_decode_acceptance_rate" else ""
    spread = f"{number(min(values))}-{number(max(values))}" if len(values) > 1 else ""
    return Cell(f"{number(statistics.median(values))}{unit}", spread)


def _median(repeats: Sequence[RunResult], name: str) -> float | None:
    values = _values(repeats, name)
    return statistics.median(values) if values else None


def _values(repeats: Sequence[RunResult], name: str) -> list[float]:
    return [value for run in repeats if (value := run.figures[name]) is not None]


def number(value: float) -> str:
    """Three digits or more: `1,234`, `56.7`, `8.90`."""
    return (
        f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def clients_text(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def turns_text(result: Result) -> Iterator[str]:
    """Agents' first turns beside later ones, which shows the effect of a prefix cache."""
    for workload in dict.fromkeys(run.workload for run in result.runs):
        for repeats in _cells(result, workload):
            first = _median(repeats, "mean_ttft_first_turn_ms")
            later = _median(repeats, "mean_ttft_later_turns_ms")
            if first is None or later is None:
                continue
            cached, read = (
                _median(repeats, name) for name in ("cached_input_tokens", "total_input_tokens")
            )
            share = (
                f"; {100 * cached / read:.0f} % of prompt tokens cached" if cached and read else ""
            )
            who = f"{clients_text(repeats[0].max_concurrency)}, {repeats[0].server}"
            yield (
                f"{workload}, {who}: TTFT {number(first)} ms in the first turn, "
                f"{number(later)} ms in later ones{share}"
            )


def lengths_text(result: Result) -> Iterator[str]:
    """The lengths of the answers of each server, and how their tokens were counted."""
    for server in result.servers:
        runs = [run for run in result.runs if run.server == server.name]
        least = [v for run in runs if (v := run.figures["min_output_len"]) is not None]
        most = [v for run in runs if (v := run.figures["max_output_len"]) is not None]
        by = " and ".join(sorted({run.output_tokens_by for run in runs} - {""}))
        if least and most:
            length = f"{min(least):.0f}-{max(most):.0f} tokens an answer"
            yield f"{server.name}: {length}, counted by {by}"
