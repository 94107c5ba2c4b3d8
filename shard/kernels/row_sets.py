"""Measures which numbers of rows give a product the same bits. Pure: computes, keeps nothing.

Backends choose the kernel of a product by its number of rows, and each kernel sums in its own
order. On Metal, from the M3 on, one row of a quantised product takes one kernel and 2 to 12 rows
another; only one of some thousand numbers of 16 bits differs, so many are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from .trial import random_rows

Product = Callable[[mx.array], mx.array]
"""x (rows, inputs) -> (rows, outputs); lazy."""

WIDTHS: Final = (1, 2, 3, 5, 6, 8, 12, 13, 16, 32, 33, 64)
"""The numbers of rows that are compared: both sides of each border that is known."""
VALUES: Final = 100_000
"""The least numbers that are compared for each width."""
MOST_ROWS: Final = 512
"""The most rows that are compared, for products with few outputs."""
_FLOORS: Final = 3
"""The widths to which a single row may be repeated, the first of WIDTHS: more would cost more than
the products of Metal, which read all weights for each call, give back."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Numbers of rows, `floor` to `ceiling`, of which each gives a row the same bits."""

    floor: int
    ceiling: int

    @property
    def is_all(self) -> bool:
        """Whether one row and all of WIDTHS agree."""
        return self == RowRange(WIDTHS[0], WIDTHS[-1])

    def __str__(self) -> str:
        return f"{self.floor} to {self.ceiling} rows"


def agreeing_rows(product: Product, inputs: int, dtype: mx.Dtype) -> RowRange | None:
    """The numbers of rows that agree, those with the smallest floor; None if no two do.

    Widths between two of WIDTHS that agree count as agreeing: kernels change at borders. `dtype`:
    that of the input.
    """
    outputs = product(random_rows((1, inputs), dtype, 0)).shape[-1]
    rows = min(-(-VALUES // outputs), MOST_ROWS)
    x = random_rows((max(rows, WIDTHS[-1]) + WIDTHS[-1], inputs), dtype, 1)

    def in_blocks(width: int, count: int) -> mx.array:
        """The products of the first `count` rows, `width` rows a call."""
        blocks = [product(x[i : i + width]) for i in range(0, count, width)]
        return mx.concatenate(blocks)[:count]

    for number, floor in enumerate(WIDTHS[:_FLOORS]):
        expected, ceiling = in_blocks(floor, max(rows, WIDTHS[-1])), floor
        mx.eval(expected)
        for width in WIDTHS[number + 1 :]:
            count = max(rows, width)
            if not mx.array_equal(expected[:count], in_blocks(width, count)).item():
                break
            ceiling = width
        if ceiling > floor:
            return RowRange(floor, ceiling)
    return None
