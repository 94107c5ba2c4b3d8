"""A benchmark's results as tables for a terminal, as JSON and as CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from .report import DRAFTING, LOOKUP, ArmSummary, CategorySummary, Spread, StepCosts, TimedRun

SCHEMA = 1
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """One prompt that ran."""

    name: str
    category: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one sweep.

    `no_drafts`: the reason why only K=0 ran, else ""; `skipped`: prompts with reasons.
    """

    created: str
    model: Mapping[str, Any]
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    greedy_identity: str
    no_drafts: str
    skipped: tuple[str, ...]
    costs: StepCosts | None
    arms: tuple[ArmSummary, ...]
    categories: tuple[CategorySummary, ...]
    prompts: tuple[PromptFacts, ...]
    runs: tuple[TimedRun, ...]

    @property
    def title(self) -> str:
        """Model, dtype and settings."""
        s = self.settings
        how = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
        return (
            f"{self.model['id']}, {self.model['dtype']}, {how}, {len(self.prompts)} prompts, "
            f"at most {s['max_tokens']} tokens, {s['repeats']} repeats"
        )

    @property
    def where(self) -> str:
        """Device and versions."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        backend = self.device["backend"]
        if backend == "cpu":
            backend = f"cpu, {self.device['cores']} cores"
        return f"{self.device['chip']} ({backend}), {versions}"


def as_json(results: Results) -> str:
    """All results as JSON, raw runs included; in seconds, tokens, shares and ratios."""
    body = {"kind": "exo-node bench mtp", "schema": SCHEMA, **asdict(results)}
    return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(results: Results) -> str:
    """One row for each arm; a spread has the columns name, name_least and name_most."""
    rows = [_flat(arm, results) for arm in results.arms]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


SHOWN_POSITIONS: Final = 6
"""Positions of drafts in a row of the table."""
_SPREADS = ("tok_s", "mean_tok_s", "vs_off", "vs_mlx_lm", "ttft_s", "ttft_vs_off")


def _flat(arm: ArmSummary, results: Results) -> dict[str, object]:
    device = results.device["chip"]
    row: dict[str, object] = {"model": results.model["id"], "device": device}
    for field in fields(arm):
        value: object = getattr(arm, field.name)
        if field.name in _SPREADS:
            row |= _spread_columns(field.name, getattr(arm, field.name))
        elif isinstance(value, tuple):
            row[field.name] = " ".join(
                f"{each:.6g}" if isinstance(each, float) else str(each) for each in value
            )
        else:
            row[field.name] = f"{value:.6g}" if isinstance(value, float) else value
    return row


def _spread_columns(name: str, spread: Spread | None) -> dict[str, object]:
    if spread is None:
        return {name: None, f"{name}_least": None, f"{name}_most": None}
    return {
        name: f"{spread.median:.6g}",
        f"{name}_least": f"{spread.least:.6g}",
        f"{name}_most": f"{spread.most:.6g}",
    }


def as_text(results: Results) -> str:
    """Tables of speed, drafts and categories, and a sentence about the fastest arm."""
    greedy = results.settings["temperature"] == 0
    parts = [
        f"{results.title}\n{results.where}\nmedians over the repeats (least-most)",
        _table(_speed_header(results, greedy=greedy), _speed_rows(results, greedy=greedy)),
    ]
    if drafting := [arm for arm in results.arms if arm.kind in DRAFTING]:
        parts.append(_table(_DRAFTS, [_drafts_row(arm) for arm in drafting]))
        if results.costs is not None:
            parts.append(_costs_note(results.costs))
    if results.categories:
        names = [arm.arm for arm in drafting]
        parts.append(_table(_category_header(names), _category_rows(results.categories, names)))
    parts.append(verdict(results))
    return "\n\n".join(parts)


def verdict(results: Results) -> str:
    """A sentence about the fastest arm and those slower than K=0."""
    if results.no_drafts:
        ratios = [a.vs_off.median for a in results.arms if a.kind == LOOKUP and a.vs_off]
        ran = f"lookup is {ratios[0]:.2f}x K=0; no other arm ran" if ratios else "only K=0 ran"
        return f"{ran}: {results.no_drafts}"
    ours = [(a.vs_off.median, a) for a in results.arms if a.vs_off and a.kind != "mlx-lm"]
    drafting = [(ratio, arm) for ratio, arm in ours if arm.kind != "off"]
    if not drafting:
        return "no arm with drafts ran"
    best, fastest = max(drafting, key=lambda pair: pair[0])
    losing = [arm.arm for ratio, arm in drafting if ratio < 1]
    if best < 1:
        return f"drafts do not pay here: the best of them, {fastest.arm}, is {best:.2f}x K=0"
    sentence = f"fastest: {fastest.arm}, {best:.2f}x K=0"
    return f"{sentence}; slower than K=0: {', '.join(losing)}" if losing else sentence


_DRAFTS = (
    *("arm", "accepted", "of emitted", "by position", "rounds", "tokens/round"),
    *("break-even", "verify", "drafts"),
)


def _speed_header(results: Results, *, greedy: bool) -> tuple[str, ...]:
    against = ("vs mlx-lm",) if results.arms[0].vs_mlx_lm else ()
    same = ("same ids",) if greedy else ()
    return ("arm", "tok/s", "vs K=0", *against, "TTFT ms", "vs K=0", *same)


def _speed_rows(results: Results, *, greedy: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for arm in results.arms:
        against = (_ratio(arm.vs_mlx_lm),) if results.arms[0].vs_mlx_lm else ()
        same = (f"{arm.same_ids}/{len(results.prompts)}",) if greedy else ()
        speed = (_spread_text(arm.tok_s, 1), _ratio(arm.vs_off))
        first = (_spread_text(_scaled(arm.ttft_s, 1e3), 1), _ratio(arm.ttft_vs_off))
        rows.append((arm.arm, *speed, *against, *first, *same))
    return rows


def _drafts_row(arm: ArmSummary) -> tuple[str, ...]:
    return (
        arm.arm,
        _percent(arm.acceptance),
        _percent(arm.accepted_of_emitted),
        _positions(arm.acceptance_per_position),
        NOTHING if arm.rounds is None else str(arm.rounds),
        _number(arm.tokens_per_round),
        _number(arm.break_even_tokens),
        _number(arm.verify_steps),
        _number(arm.draft_steps),
    )


def _positions(shares: Sequence[float]) -> str:
    """Shares in percent; of copies, which are long, the first ones."""
    first = " ".join(f"{100 * share:.0f}" for share in shares[:SHOWN_POSITIONS]) or NOTHING
    return f"{first} …" if len(shares) > SHOWN_POSITIONS else first


def _costs_note(costs: StepCosts) -> str:
    return (
        "A round pays when its tokens/round are above its break-even: the plain steps it took. "
        "Verify and\ndrafts are what they cost by themselves, in plain steps of "
        f"{1e3 * costs.plain_s:.2f} ms; by position: % accepted of the\nfirst, second, … drafts."
    )


def _category_header(names: Sequence[str]) -> tuple[str, ...]:
    return ("vs K=0 (accepted)", "prompts", *names)


def _category_rows(
    summaries: Sequence[CategorySummary], names: Sequence[str]
) -> list[tuple[str, ...]]:
    cells = {(each.category, each.arm): each for each in summaries}
    counts = {each.category: each.prompts for each in summaries}
    return [
        (
            category or "(none)",
            str(count),
            *(_category_cell(cells[category, name]) for name in names),
        )
        for category, count in counts.items()
    ]


def _category_cell(summary: CategorySummary) -> str:
    speed = NOTHING if summary.vs_off is None else f"{summary.vs_off.median:.2f}"
    return f"{speed} ({_percent(summary.acceptance)})"


def _scaled(spread: Spread | None, factor: float) -> Spread | None:
    if spread is None:
        return None
    return Spread(spread.median * factor, spread.least * factor, spread.most * factor)


def _ratio(spread: Spread | None) -> str:
    return _spread_text(spread, 2)


def _spread_text(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return NOTHING
    return f"{spread.median:.{digits}f} ({spread.least:.{digits}f}-{spread.most:.{digits}f})"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is left-aligned and whose figures are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
