"""Output of `bench/serve.py`: JSON with every answer, CSV with every run, tables of medians."""

import csv
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from serve_metrics import RATIOS, Run, errors, figures, ratios, same_answers

JSON_FILE, CSV_FILE = "serve.json", "serve.csv"
_TABLE: Final = {
    "output_throughput": "tok/s",
    "mean_ttft_ms": "TTFT",
    "p99_ttft_ms": "TTFT p99",
    "mean_tpot_ms": "TPOT",
    "p50_itl_ms": "ITL p50",
    "p95_itl_ms": "ITL p95",
    "p99_itl_ms": "ITL p99",
    "mean_e2el_ms": "end to end",
}
_COUNTS: Final = ("completed", "failed", "refused", "ended_early")


def write(folder: Path, facts: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Rewrites both files, so that an interrupted bench leaves its results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [figures(run) for run in runs]
    answers = [[_answer(answer) for answer in run.answers] for run in runs]
    runs_out = [{**row, "answers": each} for row, each in zip(rows, answers, strict=True)]
    _ = (folder / JSON_FILE).write_text(json.dumps({**facts, "runs": runs_out}, indent=1) + "\n")
    with (folder / CSV_FILE).open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _answer(answer: Any) -> dict[str, Any]:
    """An answer with times relative to its request; without text, which the seed reproduces."""
    fields = asdict(answer)
    del fields["text"]
    started = fields.pop("started")
    fields["ended"] = round(answer.ended - started, 6)
    fields["chunks"] = [round(at - started, 6) for at in answer.chunks]
    return fields


def tables(runs: Sequence[Run], servers: Sequence[str]) -> Iterator[str]:
    """Markdown, a table for each workload, then ratios, failures and equal answers."""
    for workload in dict.fromkeys(run.workload for run in runs):
        yield from _figures([run for run in runs if run.workload == workload], workload)
    for other in servers[1:]:
        yield from _ratios(runs, servers[0], other)
    for server, counts in errors(runs).items():
        for what, times in counts.most_common():
            yield f"{server}: {times} failed: {what}"


def _figures(runs: Sequence[Run], workload: str) -> Iterator[str]:
    yield f"\n{workload}: medians over repeats, milliseconds\n"
    names = [*_TABLE.values(), "out tokens", "completed/failed/refused/ended early"]
    yield f"| clients | server | {' | '.join(names)} |"
    yield "|---" * (2 + len(names)) + "|"
    for cell in sorted({(run.concurrency, run.server) for run in runs}):
        rows = [figures(run) for run in runs if (run.concurrency, run.server) == cell]
        medians = [_median([row[name] for row in rows]) for name in _TABLE]
        lengths = [row[name] for row in rows for name in ("min_output_len", "max_output_len")]
        lengths_in_tokens = [int(each) for each in lengths if isinstance(each, int)]
        by = "/".join(sorted({str(row["output_tokens_by"]) for row in rows} - {""}))
        length = (
            f"{min(lengths_in_tokens)}-{max(lengths_in_tokens)} by {by}"
            if lengths_in_tokens
            else ""
        )
        counts = "/".join(str(sum(int(row[name] or 0) for row in rows)) for name in _COUNTS)
        yield f"| {cell[0]} | {cell[1]} | {' | '.join(medians)} | {length} | {counts} |"
    yield from _turns(runs)


def _turns(runs: Sequence[Run]) -> Iterator[str]:
    """Compares an agent's later turns with its first, which shows the effect of a prefix cache."""
    for cell in sorted({(run.concurrency, run.server) for run in runs}):
        rows = [figures(run) for run in runs if (run.concurrency, run.server) == cell]
        first = _median([row["mean_ttft_first_turn_ms"] for row in rows])
        later = _median([row["mean_ttft_later_turns_ms"] for row in rows])
        if later:
            read = [row["total_input_tokens"] for row in rows]
            cached = _median([row["cached_input_tokens"] for row in rows]) or "untold"
            yield (
                f"{cell[0]} clients, {cell[1]}: TTFT {first} ms in the first turn, {later} ms in"
                f" later ones; {cached} of {_median(read) or 'untold'} prompt tokens cached"
            )


def _ratios(runs: Sequence[Run], first: str, second: str) -> Iterator[str]:
    yield f"\n{first} / {second}: medians of the ratios within a repeat (least-most)\n"
    yield f"| workload | clients | {' | '.join(RATIOS)} |"
    yield "|---" * (2 + len(RATIOS)) + "|"
    for (workload, concurrency), cell_ratios in ratios(runs, first, second).items():
        cells = [str(cell_ratios.get(name, "")) for name in RATIOS]
        yield f"| {workload} | {concurrency} | {' | '.join(cells)} |"
    both, same = same_answers(runs, first, second)
    yield f"\nSame text in {same} of {both} answers that both gave"


def _median(values: Sequence[Any]) -> str:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return f"{statistics.median(numbers):.1f}" if numbers else ""
