"""The charts of a result as SVG, drawn with matplotlib if that is installed."""

import io
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .result import Result, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL: Final = (
    "the page has no charts: matplotlib is not installed; `pip install 'exo-node[bench]'` brings it"
)
COLOURS: Final = ("#2f88d0", "#d98200", "#0a9a70", "#d5573b")
"""Seen on light and on dark paper."""
_TEXT: Final = "#010203"
"""A colour that the charts have nowhere else: the page's own replaces it."""
_GRID: Final = "#808080"
_PANELS: Final = (
    ("output_throughput", "tokens/s, all clients"),
    ("median_ttft_ms", "median TTFT, ms"),
    ("p99_itl_ms", "p99 ITL, ms"),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its text for those who do not see it, and its SVG element."""

    workload: str
    label: str
    svg: str


def draw(result: Result) -> tuple[Chart, ...] | str:
    """The charts of each workload over the number of clients; or the reason why there are none."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return INSTALL
    charts: list[Chart] = []
    servers = [server.name for server in result.servers]
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",  # text in the page's font
            "text.color": _TEXT,
            "axes.labelcolor": _TEXT,
            "axes.edgecolor": _GRID,
            "xtick.color": _TEXT,
            "ytick.color": _TEXT,
        }
    ):
        for workload in dict.fromkeys(run.workload for run in result.runs):
            runs = [run for run in result.runs if run.workload == workload]
            for name, label in _PANELS:
                figure = Figure(figsize=(4.2, 2.6), layout="constrained")
                _lines(figure.subplots(), runs, servers, name)
                out = io.StringIO()
                figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
                charts.append(Chart(workload, label, _inline(out.getvalue(), f"c{len(charts)}")))
    return tuple(charts)


_NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}


def _inline(svg: str, prefix: str) -> str:
    """The element without prologue, with ids of its own and the page's colour of text."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", element)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    return element.replace(_TEXT, "currentColor")


def _lines(axes: "Axes", runs: Sequence[RunResult], servers: Sequence[str], name: str) -> None:
    """Draws a line for each server over the clients; bars reach from the minimum to the maximum."""
    clients = sorted({run.max_concurrency for run in runs})
    for number, server in enumerate(servers):
        points = list(_points([run for run in runs if run.server == server], name))
        _ = axes.errorbar(
            [x for x, *_ in points],
            [middle for _, middle, _, _ in points],
            yerr=[[m - low for _, m, low, _ in points], [top - m for _, m, _, top in points]],
            marker="o",
            capsize=3,
            color=COLOURS[number % len(COLOURS)],
            label=server,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    _ = axes.set_xticks(clients, [str(each) for each in clients])
    _ = axes.set_xlabel("clients")
    axes.grid(axis="y", color=_GRID, alpha=0.3, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(servers) > 1:
        _ = axes.legend(frameon=False, fontsize=8)


def _points(runs: Sequence[RunResult], name: str) -> Iterator[tuple[int, float, float, float]]:
    """Clients, and the median, least and most of the repeats."""
    for clients in sorted({run.max_concurrency for run in runs}):
        values = [
            value
            for run in runs
            if run.max_concurrency == clients and (value := run.figures[name]) is not None
        ]
        if values:
            yield clients, statistics.median(values), min(values), max(values)
