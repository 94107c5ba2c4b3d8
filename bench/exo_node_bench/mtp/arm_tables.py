"""The tables of a sweep: speed, drafts, kinds of prompts; and a sentence about the fastest arm."""

from collections.abc import Sequence
from typing import Final

from ..spread import Spread
from ..tables import NOTHING, Cell, Table, number, table_text
from .report import DRAFTING, LOOKUP, ArmSummary
from .results import Results

SHOWN_POSITIONS: Final = 6
"""Positions of drafts in a row of the table."""
_SPREADS: Final = ("tok/s", "vs K=0", "vs mlx-lm", "TTFT ms", "TTFT vs K=0")
_DRAFTS: Final = (
    *("arm", "accepted", "of emitted", "by position", "rounds", "tokens/round"),
    *("break-even", "verify", "drafts"),
)


def as_text(results: Results) -> str:
    """The tables for the terminal, and the verdict."""
    parts = [f"{results.title}\n{results.where}\nmedians over the repeats (least-most)"]
    parts += [table_text(table, _SPREADS, None) for table in arm_tables(results)]
    return "\n\n".join([*parts, *costs_note(results), verdict(results)])


def arm_tables(results: Results) -> list[Table]:
    """The tables that have rows."""
    drafting = drafting_arms(results)
    rows = tuple(map(_drafts_row, drafting))
    tables = [speed_table(results), Table("Drafts", _DRAFTS, rows, names=("arm", "by position"))]
    return [each for each in [*tables, _category_table(results, drafting)] if each.rows]


def drafting_arms(results: Results) -> list[ArmSummary]:
    return [arm for arm in results.arms if arm.kind in DRAFTING]


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


def costs_note(results: Results) -> list[str]:
    if results.costs is None:
        return []
    return [
        "A round pays when its tokens/round are above its break-even: the plain steps it took. "
        "Verify and\ndrafts are what they cost by themselves, in plain steps of "
        f"{1e3 * results.costs.plain_s:.2f} ms; by position: % accepted of the\n"
        "first, second, … drafts."
    ]


def speed_table(results: Results) -> Table:
    """Speed and time to the first token of each arm; ids are compared where answers are greedy."""
    against = ("vs mlx-lm",) if results.arms[0].vs_mlx_lm else ()
    same = ("same ids",) if results.settings["temperature"] == 0 else ()
    header = ("arm", "tok/s", "vs K=0", *against, "TTFT ms", "TTFT vs K=0", *same)
    fastest = max((arm.tok_s.median for arm in results.arms if arm.tok_s), default=0.0)
    rows: list[tuple[Cell, ...]] = []
    for arm in results.arms:
        speed = Cell.of(arm.tok_s)
        share = arm.tok_s.median / fastest if arm.tok_s and fastest else None
        rows.append(
            (
                Cell(arm.arm),
                Cell(speed.text, speed.spread, share),
                Cell.of(arm.vs_off),
                *(Cell.of(arm.vs_mlx_lm) for _ in against),
                Cell.of(arm.ttft_s and _in_ms(arm.ttft_s)),
                Cell.of(arm.ttft_vs_off),
                *(Cell(f"{arm.same_ids}/{len(results.prompts)}") for _ in same),
            )
        )
    return Table("Speed", header, tuple(rows), names=("arm",))


def _in_ms(spread: Spread) -> Spread:
    return Spread(1e3 * spread.median, 1e3 * spread.least, 1e3 * spread.most)


def _drafts_row(arm: ArmSummary) -> tuple[Cell, ...]:
    texts = (
        arm.arm,
        _percent(arm.acceptance),
        _percent(arm.accepted_of_emitted),
        _positions(arm.acceptance_per_position),
        NOTHING if arm.rounds is None else str(arm.rounds),
        *map(
            _number,
            (arm.tokens_per_round, arm.break_even_tokens, arm.verify_steps, arm.draft_steps),
        ),
    )
    return tuple(map(Cell, texts))


def _category_table(results: Results, drafting: Sequence[ArmSummary]) -> Table:
    """The ratio to K=0 and the share of accepted drafts, for each kind of prompt."""
    cells = {(each.category, each.arm): each for each in results.categories}
    counts = {each.category: each.prompts for each in results.categories}
    rows = tuple(
        (
            Cell(category or "(none)"),
            Cell(str(count)),
            *(
                Cell(f"{Cell.of(each.vs_off).text} ({_percent(each.acceptance)})")
                for arm in drafting
                for each in [cells[category, arm.arm]]
            ),
        )
        for category, count in counts.items()
    )
    header = ("vs K=0 (accepted)", "prompts", *(arm.arm for arm in drafting))
    return Table("Kinds of prompts", header, rows, names=header[:1])


def _positions(shares: Sequence[float]) -> str:
    """Shares in percent; of copies, which are long, the first ones."""
    first = " ".join(f"{100 * share:.0f}" for share in shares[:SHOWN_POSITIONS]) or NOTHING
    return f"{first} …" if len(shares) > SHOWN_POSITIONS else first


def _number(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"
