"""The page of a bench: one HTML file without scripts and requests, to be shared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined

from .charts import Chart
from .tables import Table

_TEMPLATE: Final = Path(__file__).parent / "page.html"

Term = tuple[str, str]
"""A term and its explanation."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table under its heading, with its charts."""

    heading: str
    table: Table
    charts: Sequence[Chart] = ()
    intro: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The texts of a page, from its top to its end."""

    title: str
    command: str
    origin: str
    """How and when it was measured."""
    headlines: Sequence[Term]
    """Figures, each with its meaning."""
    facts: Sequence[tuple[str, Sequence[Term]]]
    sections: Sequence[Section]
    intro: str
    legend: Sequence[Term]
    footer: str
    warnings: Sequence[str] = ()
    failures: Sequence[str] = ()
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML. All texts are escaped but the charts, which are elements."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(page=page)
