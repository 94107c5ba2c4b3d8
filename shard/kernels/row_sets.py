"""Measures which numbers of rows give a product the same bits. Pure: computes, keeps nothing.

Backends choose the kernel of a product by its number of rows, and each kernel sums in its own
order. On Metal, from the M3 on, one row of a quantised product takes one kernel and 2 to 12 rows
another; only one of some thousand numbers of 16 bits differs, so many are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from .trial import random_rows

Product = Callable[[mx.array], mx.array]
"""x (rows, inputs) -> (rows, outputs); lazy."""

WIDTHS: Final = (1, 2, 3, 5, 6, 8, 12, 13, 16, 32, 33, 64)
"""The numbers of rows that are compared on Metal: both sides of each border that is known."""
VALUES: Final = 100_000
"""The least numbers that are compared for each width."""
MOST_ROWS: Final = 16_384
"""The most rows that are compared, for products with few outputs."""
_FLOORS: Final = 3
"""The widths to which a single row may be repeated, the first of WIDTHS: more would cost more than
the products of Metal, which read all weights for each call, give back."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Numbers of rows, `floor` to `ceiling`, of which each gives a row the same bits."""

    floor: int
    ceiling: int

    def __str__(self) -> str:
        return f"{self.floor} to {self.ceiling} rows" if self.ceiling > 1 else "single rows"


def agreeing_rows(
    product: Product, inputs: int, dtype: mx.Dtype, widths: Sequence[int] = WIDTHS
) -> RowRange | None:
    """The numbers of rows that agree, those with the smallest floor.

    If no two do, each row is computed alone; None if not even that gives the same bits twice.
    Numbers between two of `widths` that agree count as agreeing: Metal's kernels change at borders.
    `dtype`: that of the input.
    """
    outputs = product(random_rows((1, inputs), dtype, 0)).shape[-1]
    rows = max(min(-(-VALUES // outputs), MOST_ROWS), widths[-1])
    x = random_rows((rows + widths[-1], inputs), dtype, 1)

    def in_blocks(width: int) -> mx.array:
        """The products of the first rows, `width` rows a call."""
        blocks = [product(x[i : i + width]) for i in range(0, rows, width)]
        out = mx.concatenate(blocks)[:rows]
        mx.eval(out)
        return out

    for number, floor in enumerate(widths[:_FLOORS]):
        expected, ceiling = in_blocks(floor), floor
        for width in widths[number + 1 :]:
            if not mx.array_equal(expected, in_blocks(width)).item():
                break
            ceiling = width
        if ceiling > floor:
            return RowRange(floor, ceiling)
    return RowRange(1, 1) if mx.array_equal(in_blocks(1), in_blocks(1)).item() else None
