"""The page of a sweep: its facts, tables and charts."""

from collections.abc import Iterator
from typing import Final

from ..charts import Chart, Line, bar_chart, line_chart
from ..page import Page, Section
from ..spread import Spread
from .arm_tables import arm_tables, drafting_arms, verdict
from .results import Results

_INTRO: Final = (
    "On every prompt all arms answer one after the other, and another one begins each time. A "
    "ratio is taken within a repeat; figures are medians over the repeats, and below them are the "
    "least and the most."
)
_LEGEND: Final = (
    ("K=0", "decoding without drafts by the same engine, the measure of the others"),
    (
        "tok/s",
        "tokens after the first one over the time since it, all prompts together",
    ),
    ("TTFT", "from the request to the first token, the mean of the prompts"),
    ("same ids", "prompts whose greedy ids were those of K=0 in every repeat"),
    (
        "accepted",
        "of proposed drafts; of emitted: of all tokens; by position: in per cent",
    ),
    (
        "break-even",
        "the plain steps that a round took. Drafts pay where tokens/round are above it",
    ),
    ("verify, drafts", "what they cost by themselves, in plain steps"),
)


def page_of(results: Results) -> Page:
    """The texts, tables and charts of a sweep."""
    drafting = {table.title: list(_charts(results, table.title)) for table in arm_tables(results)}
    return Page(
        title=f"{results.model['id']} on {results.device['chip']}",
        command="exo-node bench mtp",
        origin=f"Measured in one process by exo-node bench mtp, {results.created[:10]}",
        headlines=[(verdict(results), "of all arms")],
        facts=[("Measurement", list(_facts(results)))],
        sections=[Section(t.title, t, drafting[t.title]) for t in arm_tables(results)],
        intro=_INTRO,
        legend=_LEGEND,
        footer="mtp.json, beside this page, has every single run; mtp.csv a row for each arm.",
    )


def _facts(results: Results) -> Iterator[tuple[str, str]]:
    yield "Run", results.title
    yield "Machine", results.where
    if results.skipped:
        yield "Skipped", f"{len(results.skipped)} prompts, which are over the context"
    if results.costs is not None:
        yield "Plain step", f"{1e3 * results.costs.plain_s:.2f} ms"


def _charts(results: Results, title: str) -> Iterator[Chart]:
    if title == "Speed":
        bars = [(arm.arm, arm.tok_s) for arm in results.arms if arm.tok_s]
        yield bar_chart("speed", "tokens/s", bars)
    elif title == "Drafts":
        lines = [
            Line(arm.arm, [(n, Spread(100 * s, 100 * s, 100 * s)) for n, s in enumerate(shares, 1)])
            for arm in drafting_arms(results)
            if (shares := arm.acceptance_per_position)
        ]
        yield line_chart("positions", "% accepted of proposed", "position of the draft", lines)
    else:
        fastest = max(drafting_arms(results), key=lambda a: a.vs_off.median if a.vs_off else 0.0)
        bars = [
            (each.category or "(none)", each.vs_off)
            for each in results.categories
            if each.arm == fastest.arm and each.vs_off
        ]
        yield bar_chart("kinds", f"{fastest.arm}, as a multiple of K=0", bars)
