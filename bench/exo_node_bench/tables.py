"""Tables of figures, for the terminal and for the page."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from exo_node.node.cli import output

from .spread import Spread

NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure's text; the least and most of the repeats; its share of the column's largest."""

    text: str
    spread: str = ""
    share: float | None = None

    @classmethod
    def of(cls, spread: Spread | None, unit: str = "") -> "Cell":
        """The cell of a figure, or of none."""
        if spread is None:
            return cls(NOTHING)
        single = spread.least == spread.most
        ends = "" if single else f"{number(spread.least)}-{number(spread.most)}"
        return cls(f"{number(spread.median)}{unit}", ends)

    def __str__(self) -> str:
        return f"{self.text} ({self.spread})" if self.spread else self.text


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title; `names` are the columns that hold words."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    names: tuple[str, ...] = ()


def table_text(table: Table, spreads: Collection[str], width: int | None) -> str:
    """A table for the terminal. `spreads`: the columns that show theirs."""
    rows = [
        [
            str(cell) if heading in spreads else cell.text
            for heading, cell in zip(table.header, row, strict=True)
        ]
        for row in table.rows
    ]
    lines = output.table([name.upper() for name in table.header], rows, width=width)
    return output.joined([table.title, *lines])


def number(value: float) -> str:
    """Three digits or more: `1,234`, `56.7`, `8.90`."""
    return (
        f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )
