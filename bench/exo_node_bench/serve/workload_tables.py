"""The tables of a result: medians over the repeats with their spread."""

from collections.abc import Iterator, Sequence
from typing import Final

from ..spread import Spread
from ..tables import Cell, Table, number
from .result import RatioResult, Result, RunResult

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
        yield Table(workload, header, rows, names=("server",))


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
        yield Table(
            title, ("workload", "clients", *(name for name, _ in _RATIOS)), rows, ("workload",)
        )


def _ratio_cells(ratios: Sequence[RatioResult], workload: str, clients: int) -> Iterator[Cell]:
    of_cell = {
        ratio.figure: ratio
        for ratio in ratios
        if (ratio.workload, ratio.max_concurrency) == (workload, clients)
    }
    for _, name in _RATIOS:
        ratio = of_cell.get(name)
        yield Cell.of(ratio and Spread(ratio.median, ratio.least, ratio.most))


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
    return Cell.of(spread_of(repeats, name), " %" if name == "spec_decode_acceptance_rate" else "")


def _median(repeats: Sequence[RunResult], name: str) -> float | None:
    spread = spread_of(repeats, name)
    return spread and spread.median


def spread_of(repeats: Sequence[RunResult], name: str) -> Spread | None:
    """The spread of a figure over the repeats that have it."""
    return Spread.of(value for run in repeats if (value := run.figures[name]) is not None)


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
