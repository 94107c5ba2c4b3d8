"""Caches in a batch hold, row by row and place by place, what they hold alone."""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from exo_node.mtp.batch_caches import (
    BatchQuantizedKVCache,
    BatchRotatingKVCache,
    left_aligned,
)
from exo_node.mtp.positions import Positions

SIZE = 8
BEHIND = [(3,), (8,), (7, 1), (5, 1, 1, 1, 1), (20,), (20, 1, 1, 1), (30, 5)]
"""Rows of the forwards before the batch, by request."""


def rows(count: int, seed: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((1, 2, count, 4), key=mx.random.key(seed + i)) for i in (0, 7))
    return keys, values


def windows() -> list[Any]:
    rings = list[Any]()
    for number, forwards in enumerate(BEHIND):
        ring: Any = RotatingKVCache(SIZE)
        for i, count in enumerate(forwards):
            _ = ring.update_and_fetch(*rows(count, 100 * number + 10 * i))
        rings.append(ring)
    return rings


def stepped(rings: list[Any], steps: int, window: int) -> BatchRotatingKVCache:
    """The batch of copies, after as many steps as the rings here make alone."""
    positions = Positions([ring.offset for ring in rings])
    (together,) = left_aligned([[each] for each in copy.deepcopy(rings)], positions)
    assert isinstance(together, BatchRotatingKVCache)
    for step in range(steps):
        new = [rows(1, 5000 + 50 * step + i) for i in range(len(rings))]
        mask = together.make_mask(1, window_size=window)
        masks = [ring.make_mask(1, window_size=window) for ring in rings]
        keys, values = (mx.concatenate([each[part] for each in new]) for part in (0, 1))
        read = together.update_and_fetch(keys, values)
        positions.advance([1] * len(rings))
        for index, ring in enumerate(rings):
            expected = ring.update_and_fetch(*new[index])
            count = expected[0].shape[2]
            for mine, theirs in zip(read, expected, strict=True):
                assert mx.array_equal(mine[index : index + 1, :, :count], theirs).item()
            visible = mx.ones((count,), mx.bool_) if masks[index] is None else masks[index]
            assert mx.array_equal(mask[index, 0, 0, :count], visible).item()
            assert not mx.any(mask[index, 0, 0, count:]).item()
    return together


@pytest.mark.parametrize("window", [SIZE, 5])
def test_each_step_reads_the_same_rows_at_the_same_places(window: int) -> None:
    _ = stepped(windows(), 19, window)


@pytest.mark.parametrize("steps", [1, 2, 11])
def test_who_leaves_goes_on_as_if_alone_all_along(steps: int) -> None:
    rings = windows()
    together = stepped(rings, steps, SIZE)
    for index, ring in enumerate(rings):
        leaver: Any = together.of(index)
        assert leaver.offset == ring.offset
        for step in range(SIZE + 2):
            expected = ring.update_and_fetch(*rows(1, step))
            got = leaver.update_and_fetch(*rows(1, step))
            assert all(mx.array_equal(a, b).item() for a, b in zip(got, expected, strict=True))


def test_a_window_takes_one_row_at_a_time() -> None:
    together = stepped(windows(), 1, SIZE)
    with pytest.raises(ValueError, match="one row at a time"):
        _ = together.update_and_fetch(*rows(2, 0))


@pytest.mark.parametrize("group", [32, 64])
def test_a_quantised_cache_that_leaves_takes_rows_in_groups_of_its_own_size(group: int) -> None:
    def row(seed: int) -> mx.array:
        return mx.random.normal((1, 2, 1, 64), key=mx.random.key(seed))

    alone: list[Any] = [QuantizedKVCache(group, 4) for _ in range(2)]
    for number, cache in enumerate(alone):
        _ = cache.update_and_fetch(row(number), row(number + 7))
    positions = Positions([1, 1])
    (together,) = left_aligned([[cache] for cache in copy.deepcopy(alone)], positions)
    assert isinstance(together, BatchQuantizedKVCache)
    both = mx.concatenate([row(20), row(21)])
    _ = together.update_and_fetch(both, both)
    positions.advance([1, 1])
    for number, cache in enumerate(alone):
        _ = cache.update_and_fetch(row(20 + number), row(20 + number))
        leaver: Any = together.of(number)
        expected, got = (each.update_and_fetch(row(30), row(31)) for each in (cache, leaver))
        for mine, theirs in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
            assert mx.array_equal(mine, theirs).item()
