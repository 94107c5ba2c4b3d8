"""Caches in a batch hold, row by row, what they hold alone."""

import copy
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from exo_node.mtp.caches.batch_caches import (
    BatchQuantizedKVCache,
    BatchWindowCache,
    change_all,
    left_aligned,
)
from exo_node.mtp.caches.batch_slots import Change, order_of
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import rollback
from exo_node.mtp.caches.window import MAX_ROLLBACK_ROWS, STEP, WindowCache

BEHIND = [(3,), (255,), (300, 1), (700, 5, 1, 1), (513,), (250, 9), (1100, 70)]
"""Rows of the forwards before the batch, by request."""
WINDOW = 200

Seen = list[tuple[mx.array, mx.array]]
"""The keys and values that each row of a forward attends to, in their order."""


def rows(count: int, seed: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((1, 2, count, 4), key=mx.random.key(seed + i)) for i in (0, 7))
    return keys, values


def windows() -> list[Any]:
    alone = list[Any]()
    for number, forwards in enumerate(BEHIND):
        window: Any = WindowCache(WINDOW)
        for i, count in enumerate(forwards):
            _ = window.update_and_fetch(*rows(count, 100 * number + 10 * i))
        alone.append(window)
    return alone


def seen(read: tuple[mx.array, mx.array], mask: mx.array) -> Seen:
    """`read`: (heads, rows, size) each, `mask`: (n, rows)."""
    chosen = [[i for i, on in enumerate(row) if on] for row in cast("Any", mask.tolist())]
    return [(read[0][:, mx.array(at)], read[1][:, mx.array(at)]) for at in chosen]


def seen_alone(cache: Any, new: tuple[mx.array, mx.array]) -> Seen:
    mask = cache.make_mask(new[0].shape[2], return_array=True)
    keys, values = cache.update_and_fetch(*new)
    return seen((keys[0], values[0]), mask)


def assert_same(some: Seen, others: Seen) -> None:
    for mine, theirs in zip(some, others, strict=True):
        assert 1 <= mine[0].shape[1] <= WINDOW
        assert all(mx.array_equal(a, b).item() for a, b in zip(mine, theirs, strict=True))


def joined(alone: list[Any]) -> tuple[BatchWindowCache, Positions]:
    positions = Positions([cache.offset for cache in alone])
    (together,) = left_aligned([[each] for each in copy.deepcopy(alone)], positions)
    assert isinstance(together, BatchWindowCache)
    return together, positions


def step(together: BatchWindowCache, positions: Positions, alone: list[Any], *steps: int) -> None:
    """Blocks of `steps` rows in the batch and alone, of which some rows are taken back.

    Of long runs some are compared.
    """
    for number, width in enumerate(steps):
        new = [rows(width, 5000 + 50 * number + i) for i in range(len(alone))]
        mask = together.make_mask(width)
        keys, values = (mx.concatenate([each[part] for each in new]) for part in (0, 1))
        read = together.update_and_fetch(keys, values)
        order = [width - (number + i) % width for i in range(len(alone))]
        positions.advance(order)
        for index, cache in enumerate(alone):
            if number % 7 and number > 20:
                _ = cache.update_and_fetch(*new[index])
            else:
                mine = seen((read[0][index], read[1][index]), mask[index, 0])
                assert_same(mine, seen_alone(cache, new[index]))
            assert cache.trim(width - order[index]) == width - order[index]


@pytest.mark.parametrize(("steps", "width"), [(600, 1), (250, 4)])
def test_each_row_reads_the_rows_of_its_window_in_order(steps: int, width: int) -> None:
    alone = windows()
    together, positions = joined(alone)
    step(together, positions, alone, *[width] * steps)
    room = together.arrays[0].shape[2]
    assert room <= WINDOW + MAX_ROLLBACK_ROWS + 3 * STEP


@pytest.mark.parametrize("steps", [1, 7])
def test_who_leaves_continues_as_if_alone_all_along(steps: int) -> None:
    alone = windows()
    together, positions = joined(alone)
    step(together, positions, alone, *[3] * steps)
    for index, cache in enumerate(alone):
        leaver = together.of(index)
        assert leaver.offset == cache.offset
        for number in range(270):
            new = rows(1, number)
            assert_same(seen_alone(leaver, new), seen_alone(cache, new))


def test_who_joins_takes_a_place_and_all_continue() -> None:
    alone = windows()
    together, positions = joined(alone[:4])
    step(together, positions, alone[:4], 3, 3)
    stay, join = [alone[0], alone[3]], copy.deepcopy(alone[6])
    counts = [each.offset for each in (*stay, join)]
    change_all([together], Change(order_of([0, 3]), counts), [[join]])
    positions.reset(counts)
    step(together, positions, [*stay, alone[6]], *[2] * 200)


def test_rows_that_were_dropped_are_not_given_back() -> None:
    cache: Any = WindowCache(WINDOW)
    for count in (2000, 600):
        _ = cache.update_and_fetch(*rows(count, count))
    with pytest.raises(AssertionError, match="asked to drop 900 rows of 0"):
        rollback([cache], 900)
    rollback([cache], MAX_ROLLBACK_ROWS)
    assert cache.offset == 2600 - MAX_ROLLBACK_ROWS


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
