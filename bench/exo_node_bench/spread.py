"""The statistics of both benches: spreads over repeats, percentiles, and the order of turns.

Figures are paired: a ratio is taken within one repeat, whose arms or servers took turns, and the
median over the repeats is shown with the least and the most. So a machine whose speed drifts slows
all of them alike.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum over the repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """The spread of `values`; None where there are none, or a repeat has none."""
        numbers: list[float] = []
        for value in values:
            if value is None:
                return None
            numbers.append(value)
        return spread(numbers) if numbers else None

    @classmethod
    def of_ratios(
        cls, values: Iterable[float | None], bases: Iterable[float | None]
    ) -> "Spread | None":
        """The spread of the ratios within each repeat."""
        return cls.of(quotient(value, base) for value, base in zip(values, bases, strict=True))

    def __format__(self, form: str) -> str:
        """Such as `1.50 (1.20-1.90)`; `form` formats each number."""
        return f"{self.median:{form}} ({self.least:{form}}-{self.most:{form}})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of one value or more."""
    return Spread(statistics.median(values), min(values), max(values))


def quotient(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile, interpolated between the two nearest values like numpy's default."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items from number `turn` on, in a circle, so that another one begins each time."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]
