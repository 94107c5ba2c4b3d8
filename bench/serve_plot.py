"""The figure of `bench/serve.py`, drawn with matplotlib if that is installed."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from serve_metrics import Run, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SVG_FILE, PNG_FILE = "serve.svg", "serve.png"
INSTALL: Final = "no figure: matplotlib is not installed; `pip install 'exo-node[bench]'` brings it"
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00")  # Okabe and Ito's
_PANELS: Final = (
    ("output_throughput", "output tokens per second"),
    ("mean_ttft_ms", "mean TTFT, ms"),
    ("p99_itl_ms", "p99 inter-token, ms"),
)


def draw(runs: Sequence[Run], title: str, folder: Path) -> tuple[Path, ...] | str:
    """Writes the figure as SVG and PNG, a row for each workload; or returns why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return INSTALL
    workloads = list(dict.fromkeys(run.workload for run in runs))
    figure = Figure(figsize=(11, 1 + 2.8 * len(workloads)), layout="constrained")
    axes = figure.subplots(len(workloads), len(_PANELS), squeeze=False)
    for row, workload in zip(axes, workloads, strict=True):
        for panel, (name, label) in zip(row, _PANELS, strict=True):
            _panel(panel, [run for run in runs if run.workload == workload], name)
            _ = panel.set_title(f"{workload}: {label}", loc="left", fontsize=9.5)
    _ = axes[0][0].legend(frameon=False)
    _ = figure.suptitle(title, fontsize=10)
    files = (folder / SVG_FILE, folder / PNG_FILE)
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _panel(axes: "Axes", runs: Sequence[Run], name: str) -> None:
    """Draws a line for each server over the clients; bars reach from the minimum to the maximum."""
    for number, server in enumerate(dict.fromkeys(run.server for run in runs)):
        points: list[tuple[int, float, float, float]] = []
        for clients in sorted({run.concurrency for run in runs}):
            rows = [figures(r) for r in runs if (r.server, r.concurrency) == (server, clients)]
            values = [float(v) for row in rows if isinstance(v := row[name], int | float)]
            if values:
                points.append((clients, statistics.median(values), min(values), max(values)))
        _ = axes.errorbar(
            [x for x, *_ in points],
            [middle for _, middle, _, _ in points],
            yerr=[[m - low for _, m, low, _ in points], [top - m for _, m, _, top in points]],
            marker="o",
            capsize=3,
            color=_COLOURS[number % len(_COLOURS)],
            label=server,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    ticks = sorted({run.concurrency for run in runs})
    _ = axes.set_xticks(ticks, [str(each) for each in ticks])
    _ = axes.set_xlabel("clients", fontsize=9)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
