"""The charts of a page as SVG elements, drawn with matplotlib."""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from .spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#2f88d0", "#d98200", "#0a9a70", "#d5573b", "#8a63c9", "#9a7d0a")
"""Seen on light and on dark paper."""
_TEXT: Final = "#010203"
"""A colour that the charts have nowhere else: the page's own replaces it."""
_GRID: Final = "#808080"
_NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its text for those who do not see it, and its SVG element."""

    label: str
    svg: str


@dataclass(frozen=True, slots=True)
class Line:
    """A named line of a chart."""

    name: str
    points: Sequence[tuple[int, Spread]]


def line_chart(
    prefix: str, label: str, x_label: str, lines: Sequence[Line], *, doubling: bool = False
) -> Chart:
    """A chart of lines; bars reach from the least to the most. `prefix` begins its ids."""
    with _style():
        figure, axes = _figure()
        for number, line in enumerate(lines):
            _ = axes.errorbar(
                [x for x, _ in line.points],
                [spread.median for _, spread in line.points],
                yerr=_errors([spread for _, spread in line.points]),
                marker="o",
                capsize=3,
                color=COLOURS[number % len(COLOURS)],
                label=line.name,
            )
        if doubling:
            axes.set_xscale("log", base=2)
        most = max((spread.most for line in lines for _, spread in line.points), default=0.0)
        axes.set_ylim(0, 1.08 * most or 1)
        ticks = sorted({x for line in lines for x, _ in line.points})
        _ = axes.set_xticks(ticks, [str(each) for each in ticks])
        _ = axes.set_xlabel(x_label)
        axes.grid(axis="y", color=_GRID, alpha=0.3, linewidth=0.8)
        if len(lines) > 1:
            _ = axes.legend(frameon=False, fontsize=8)
        return Chart(label, _element(figure, prefix))


def bar_chart(prefix: str, label: str, bars: Sequence[tuple[str, Spread]]) -> Chart:
    """A chart of horizontal bars, the first one at the top. `prefix` begins its ids."""
    with _style():
        figure, axes = _figure()
        spreads = [spread for _, spread in bars]
        _ = axes.barh(
            range(len(bars)),
            [spread.median for spread in spreads],
            xerr=_errors(spreads),
            color=COLOURS[0],
            error_kw={"ecolor": _GRID, "capsize": 3},
        )
        _ = axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.invert_yaxis()
        axes.grid(axis="x", color=_GRID, alpha=0.3, linewidth=0.8)
        return Chart(label, _element(figure, prefix))


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "svg.fonttype": "none",  # text in the page's font
            "text.color": _TEXT,
            "text.parse_math": False,  # names are texts
            "axes.labelcolor": _TEXT,
            "axes.edgecolor": _GRID,
            "xtick.color": _TEXT,
            "ytick.color": _TEXT,
        }
    )


def _figure() -> "tuple[Figure, Axes]":
    figure = Figure(figsize=(4.2, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    return [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]


def _element(figure: Figure, prefix: str) -> str:
    """The element without prologue, with ids of its own and the page's colour of text."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = out.getvalue()
    element = svg[svg.index("<svg") :]
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", element)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    return element.replace(_TEXT, "currentColor")
