"""The stand-ins for Apple's chips compute what is known of Metal: which rows of attention agree.

`test_row_sets.py` has the products.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from chips import M1, M3, M3_MAX, M5, Chip, on_chip

M2_ULTRA = Chip("M2 Ultra", 14, "d")


@cache
def noise(heads: int, size: int, number: int) -> mx.array:
    """(1, heads, rows, size)"""
    rows = 4010 if heads > 1 else 16_400
    made = mx.random.normal((1, heads, rows, size), key=mx.random.key(number))
    mx.eval(made)
    return made


def attention(
    group: int, size: int, at: int, rows: int, *, keys: int = 0, **options: Any
) -> mx.array:
    """(rows, group size) of rows at positions `at` and on, which see all keys before them.

    `keys`: with an array mask, of so many keys; else causal.
    """
    end = keys or at + rows
    q = noise(32, size, 1)[:, :group, at % 4000 : at % 4000 + rows]
    k, v = (noise(1, size, i)[:, :, :end] for i in (2, 3))
    mask: Any = "causal" if rows > 1 else None
    if keys:
        mask = mx.arange(end) <= mx.arange(at, at + rows)[:, None]
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=size**-0.5, mask=mask, **options)
    return out[0].swapaxes(0, 1).reshape(rows, -1)


def equal(chip: Chip, group: int, size: int, start: int, rows: int, floor: int, **more: Any) -> str:
    """For each row of a block after `start` keys, "=" if it is that of the block of `floor` rows
    which it begins, else "x"."""
    with on_chip(chip):
        block = attention(group, size, start, rows, **more)
        steps = [attention(group, size, start + r, floor, **more)[0] for r in range(rows)]
        return "".join("=" if mx.array_equal(block[r], steps[r]) else "x" for r in range(rows))


@pytest.mark.parametrize(
    ("chip", "group", "size", "start", "to_one", "to_two"),
    [
        (M1, 4, 64, 200, "====", "===="),
        (M5, 8, 128, 200, "====", "===="),
        (M3, 4, 64, 1100, "====", "===="),  # one pass up to 4,095 keys
        (M3_MAX, 6, 64, 1100, "====", "===="),
        (M3_MAX, 4, 64, 1100, "xxxx", "===="),
        (M3_MAX, 2, 64, 1100, "xxxx", "xxxx"),
        (M3, 2, 64, 4200, "xxxx", "===="),
        (M2_ULTRA, 4, 64, 1100, "====", "===="),
        (M2_ULTRA, 4, 64, 16_390, "xxxx", "===="),
        (M2_ULTRA, 2, 64, 16_390, "xxxx", "xxxx"),
        (M3_MAX, 8, 64, 8200, "xxxx", "===="),
        (M3, 4, 64, 4093, "xx==", "x==="),
        (M3_MAX, 6, 64, 1020, "xxx=", "xx=x"),
    ],
    ids=str,
)
def test_rows_of_a_block_against_single_steps_and_pairs(
    chip: Chip, group: int, size: int, start: int, to_one: str, to_two: str
) -> None:
    assert equal(chip, group, size, start, 4, 1) == to_one
    assert equal(chip, group, size, start, 4, 2) == to_two


def test_sinks_have_no_kernel_of_one_row() -> None:
    """gpt-oss has sinks, and 8 heads for each key head."""
    assert equal(M3_MAX, 8, 64, 8200, 4, 1, sinks=mx.zeros((8,))) == "===="
    assert equal(M3_MAX, 8, 64, 8200, 4, 1) == "xxxx"


@pytest.mark.parametrize(
    ("chip", "own", "longest", "same"),
    [
        (M3, 200, 300, True),
        (M3_MAX, 200, 1100, False),
        (M3_MAX, 1100, 1500, True),
        (M3, 200, 4200, False),
    ],
)
def test_a_neighbour_with_more_keys_may_change_a_row(
    chip: Chip, own: int, longest: int, *, same: bool
) -> None:
    with on_chip(chip):
        alone = attention(4, 64, own - 1, 1)
        beside = attention(4, 64, own - 1, 1, keys=longest)
    assert mx.array_equal(alone, beside).item() == same


@pytest.mark.parametrize(("begin", "same"), [(64, True), (32, False)])
def test_a_window_that_begins_elsewhere_in_its_blocks_changes_a_row(
    begin: int, *, same: bool
) -> None:
    """Two passes of 64 blocks: a window that moved by 32 keys shifts them."""
    with on_chip(M3_MAX):
        mask = mx.arange(begin, 1300) >= 80
        stock = mx.fast.scaled_dot_product_attention
        q, k, v = noise(32, 64, 1)[:, :4, :1], noise(1, 64, 2), noise(1, 64, 3)
        options: Any = {"scale": 0.125}
        whole = stock(q, k[:, :, :1300], v[:, :, :1300], mask=mx.arange(1300) >= 80, **options)
        part = stock(q, k[:, :, begin:1300], v[:, :, begin:1300], mask=mask, **options)
    assert mx.array_equal(whole, part).item() == same


@pytest.mark.parametrize("rows", [9, 5])
def test_more_lanes_than_32_are_not_fused(rows: int) -> None:
    """8 rows at most, and 32 of rows times group: 4 rows where the group is 8."""
    group = 8 if rows == 5 else 1
    assert equal(M3, group, 64, 200, rows, 1) == "x" * rows
    assert equal(M3, group, 64, 200, rows - 1, 1) == "=" * (rows - 1)
