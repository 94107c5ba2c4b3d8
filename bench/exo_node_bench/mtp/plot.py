"""The figure of a benchmark, drawn with matplotlib if that is installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .output import Results
from .report import DRAFTING, ArmSummary, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PNG_FILE, SVG_FILE = "mtp.png", "mtp.svg"
INSTALL = "matplotlib is not installed; `pip install 'exo-node[bench]'` brings it"

# Okabe and Ito's colours, distinct with any colour vision; grey for arms without drafts.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#F0E442", "#000000", "#7F3C8D")
_LOOKUP, _BOTH = "#8C6D31", "#000000"
_ADAPTIVE, _PLAIN, _REFERENCE, _INK = "#CC79A7", "#7F7F7F", "#BFBFBF", "#333333"


@dataclass(frozen=True, slots=True)
class NoPlot:
    """The reason why there is no figure, with the remedy."""

    reason: str


def draw(results: Results, folder: Path) -> tuple[Path, ...] | NoPlot:
    """Writes the figure as PNG and SVG. Raises OSError."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return NoPlot(INSTALL)
    drafting = [arm for arm in results.arms if arm.kind in DRAFTING]
    with rc_context({"svg.fonttype": "none", "font.size": 9.5, "axes.titlesize": 10.5}):
        tall = 4.2 if not drafting else 8.4 if results.categories else 7.4
        figure = Figure(figsize=(11, tall), layout="constrained")
        if drafting:
            speed, even, shares, kinds = figure.subplots(2, 2).ravel()
            _draw_break_even(even, drafting)
            _draw_acceptance(shares, drafting)
            _draw_categories(kinds, results, drafting)
        else:
            speed = figure.subplots()
        _draw_speed(speed, results)
        _ = figure.suptitle(f"{results.title}\n{results.where}", fontsize=10.5, color=_INK)
        files = (folder / PNG_FILE, folder / SVG_FILE)
        for file in files:
            figure.savefig(file, dpi=150)
    return files


def colour_of(arm: ArmSummary) -> str:
    """The colour of an arm, the same in every panel and every figure."""
    match arm.kind:
        case "mlx-lm":
            return _REFERENCE
        case "off":
            return _PLAIN
        case "adaptive":
            return _ADAPTIVE
        case "lookup":
            return _LOOKUP
        case "both":
            return _BOTH
        case "fixed":
            return _COLOURS[(arm.k - 1) % len(_COLOURS)]


def _draw_speed(axes: "Axes", results: Results) -> None:
    arms = [(arm, arm.tok_s) for arm in results.arms if arm.tok_s is not None]
    for at, (arm, speed) in enumerate(arms):
        _bar(axes, at, speed, colour_of(arm))
        if arm.vs_off is not None:
            _ = axes.annotate(
                f"{arm.vs_off.median:.2f}x",
                (at, speed.most),
                (0, 3),
                textcoords="offset points",
                ha="center",
            )
    _ = axes.set_xticks(range(len(arms)), [arm.arm for arm, _ in arms])
    axes.margins(y=0.12)
    _label(axes, "Speed: median, least to most, ratio to K=0", "tokens per second")


def _draw_break_even(axes: "Axes", drafting: Sequence[ArmSummary]) -> None:
    """Tokens emitted by a round over plain steps it takes: above the diagonal drafts pay."""
    points = [
        (arm, arm.break_even_tokens, arm.tokens_per_round)
        for arm in drafting
        if arm.break_even_tokens is not None and arm.tokens_per_round is not None
    ]
    top = 1.12 * max([2.0, *(max(cost, emitted) for _, cost, emitted in points)])
    _ = axes.fill_between([1, top], [1, top], [top, top], color="#009E73", alpha=0.08, linewidth=0)
    _ = axes.plot([1, top], [1, top], color=_INK, linewidth=1, linestyle="--")
    _ = axes.text(0.04, 0.95, "drafts pay", transform=axes.transAxes, va="top", color=_INK)
    _ = axes.text(0.96, 0.05, "drafts cost", transform=axes.transAxes, ha="right", color=_INK)
    for arm, cost, emitted in points:
        _ = axes.plot([cost], [emitted], _marker(arm), color=colour_of(arm), markersize=9)
        # Away from the diagonal; the adaptive arm lies near some fixed one.
        side = 1 if arm.kind == "adaptive" or emitted < cost else -1
        _ = axes.annotate(
            arm.arm,
            (cost, emitted),
            (9 * side, -12 if arm.kind == "adaptive" else -4),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
        )
    axes.set_xlim(1, top)
    axes.set_ylim(1, top)
    _ = axes.set_xlabel("break-even: plain steps that a round took")
    _label(axes, "Break-even", "tokens that a round emitted")


def _draw_acceptance(axes: "Axes", drafting: Sequence[ArmSummary]) -> None:
    for arm in drafting:
        shares = [100 * share for share in arm.acceptance_per_position]
        style = "-" if arm.kind == "fixed" else "--"
        _ = axes.plot(
            range(1, len(shares) + 1),
            shares,
            marker=_marker(arm),
            linestyle=style,
            color=colour_of(arm),
            label=arm.arm,
        )
    _ = axes.set_xticks(range(1, 1 + max(arm.k for arm in drafting)))
    axes.set_ylim(0, 104)
    _ = axes.set_xlabel("position of the draft in its round")
    _ = axes.legend(loc="lower left", frameon=False)
    _label(axes, "Acceptance by position", "% accepted of proposed")


def _draw_categories(axes: "Axes", results: Results, drafting: Sequence[ArmSummary]) -> None:
    """Draws the fastest arm by category; without categories, times to the first token."""
    if not results.categories:
        _draw_ttft(axes, results)
        return
    best = max(drafting, key=lambda arm: arm.vs_off.median if arm.vs_off else 0.0)
    ratios = [
        (each.category, each.vs_off)
        for each in results.categories
        if each.arm == best.arm and each.vs_off is not None
    ]
    ratios.sort(key=lambda pair: pair[1].median)
    for at, (_, ratio) in enumerate(ratios):
        _ = axes.barh(
            [at],
            [ratio.median],
            xerr=_error(ratio),
            color=colour_of(best),
            height=0.65,
            error_kw={"ecolor": _INK, "capsize": 2, "linewidth": 1},
        )
    _ = axes.axvline(1, color=_INK, linewidth=1, linestyle="--")
    _ = axes.set_yticks(range(len(ratios)), [category or "(none)" for category, _ in ratios])
    _ = axes.set_xlabel("speed as a multiple of K=0")
    _label(axes, f"{best.arm} by kind of prompt", "", grid="x")


def _draw_ttft(axes: "Axes", results: Results) -> None:
    arms = [(arm, arm.ttft_s) for arm in results.arms if arm.ttft_s is not None]
    for at, (arm, first) in enumerate(arms):
        scaled = Spread(*(1e3 * part for part in (first.median, first.least, first.most)))
        _bar(axes, at, scaled, colour_of(arm))
    _ = axes.set_xticks(range(len(arms)), [arm.arm for arm, _ in arms])
    _label(axes, "Time to first token, mean of the prompts", "milliseconds")


def _bar(axes: "Axes", at: int, spread: Spread, colour: str) -> None:
    _ = axes.bar(
        [at],
        [spread.median],
        yerr=_error(spread),
        color=colour,
        width=0.65,
        error_kw={"ecolor": _INK, "capsize": 4, "linewidth": 1},
    )


def _error(spread: Spread) -> list[list[float]]:
    return [[spread.median - spread.least], [spread.most - spread.median]]


def _marker(arm: ArmSummary) -> str:
    return "osv^P*Xh"[(arm.k - 1) % 8] if arm.kind == "fixed" else "D"


def _label(axes: "Axes", title: str, y: str, grid: str = "y") -> None:
    _ = axes.set_title(title, loc="left", fontweight="bold", color=_INK)
    _ = axes.set_ylabel(y)
    axes.grid(axis="x" if grid == "x" else "y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
