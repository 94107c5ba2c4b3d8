"""Requests that join and leave a batch where it is have the rows that they have alone."""

import random
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from exo_node.mtp.caches.batch_caches import BatchKVCache, BatchTapedCache, change_all, left_aligned
from exo_node.mtp.caches.batch_slots import ROOM, Change, order_of
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import RowChoice, TapedCache, cache_arrays, kept_row_index

SIZE = 64


def rows(count: int, key: int) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((1, 2, count, SIZE), key=mx.random.key(key + i)) for i in (0, 1)
    )
    return keys, values


def alone(count: int, key: int) -> list[Any]:
    """A request's caches, by layer, after `count` rows."""
    caches: list[Any] = [KVCache(), QuantizedKVCache(SIZE, 8), TapedCache(2)]
    for cache in caches[:2]:
        _ = cache.update_and_fetch(*rows(count, key))
    caches[2].cache = [mx.random.normal((1, 3, 4), key=mx.random.key(key + i)) for i in (2, 3)]
    mx.eval(cache_arrays(caches))
    return caches


def step(together: list[Any], positions: Positions, requests: list[list[Any]], key: int) -> None:
    """Two rows more for each, one of which is dropped; a state of its own for each."""
    new = [rows(2, key + 10 * place) for place in range(len(requests))]
    keys, values = (mx.concatenate([each[i] for each in new]) for i in (0, 1))
    for cache in together[:2]:
        _ = cache.update_and_fetch(keys, values)
    together[2].cache = [state + 1 for state in together[2].cache]
    positions.advance([1] * len(requests))
    for caches, each in zip(requests, new, strict=True):
        for cache in caches[:2]:
            _ = cache.update_and_fetch(*each)
            cache.trim(1)
        caches[2].cache = [state + 1 for state in caches[2].cache]
    mx.eval(cache_arrays(together))


def check(together: list[Any], requests: list[list[Any]]) -> None:
    for place, caches in enumerate(requests):
        for mine, cache in zip(caches, together, strict=True):
            read = cache.of(place)
            expected, got = cache_arrays([mine]), cache_arrays([read])
            if not isinstance(mine, TapedCache):
                assert read.offset == mine.offset
                expected, got = (
                    [a[..., : mine.offset, :] for a in each] for each in (expected, got)
                )
            assert all(mx.array_equal(a, b).item() for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("seed", seeds(4, 40))
def test_random_changes_leave_each_its_own_rows_and_little_room_to_nobody(seed: int) -> None:
    draw = random.Random(seed)
    requests = [alone(draw.choice([3, 90, 250]), 1000 * i) for i in range(4)]
    positions = Positions([caches[0].offset for caches in requests])
    together: list[Any] = left_aligned(requests, positions)
    for number in range(30):
        stays = sorted(draw.sample(range(len(requests)), draw.randint(1, len(requests))))
        few = draw.choice([0, 1, 1, 4]) if len(requests) < 12 else 0
        joins = [
            alone(draw.choice([3, 90, 250, 300]), 9000 + 100 * number + 10 * i) for i in range(few)
        ]
        order = order_of(stays)
        row_counts = [*(positions.rows[i] for i in order), *(each[0].offset for each in joins)]
        change_all(together, Change(order, row_counts), joins)
        positions.reset(row_counts)
        requests = [*(requests[i] for i in order), *joins]
        step(together, positions, requests, 100 * number)
        check(together, requests)
        size, (slots, _, room, _) = len(requests), together[0].keys.shape
        assert slots <= size + max(1, size // 2)
        assert room <= max(positions.rows) + 2 * ROOM + ROOM // 4
        assert sum(a.nbytes for a in cache_arrays(together[:1])) == 2 * slots * 2 * room * SIZE * 4


def one_layer(counts: list[int]) -> tuple[list[Any], Positions]:
    positions = Positions(counts)
    caches = left_aligned([[alone(count, 50 * i)[0]] for i, count in enumerate(counts)], positions)
    mx.eval(cache_arrays(caches))
    return list(caches), positions


def changed(together: list[Any], positions: Positions, stays: list[int], joins: list[int]) -> None:
    order = order_of(stays)
    row_counts = [*(positions.rows[i] for i in order), *joins]
    coming = [[alone(count, 7000 + count)[0]] for count in joins]
    change_all(together, Change(order, row_counts), coming)
    positions.reset(row_counts)
    del coming
    mx.eval(cache_arrays(together))


def test_numbers_that_are_none_do_not_stay_in_a_slot_for_the_next_one() -> None:
    """Behind a mask they would still be multiplied by 0."""
    together, positions = one_layer([90, 5])
    cache = together[0]
    assert isinstance(cache, BatchKVCache) and cache.keys is not None and cache.values is not None
    cache.keys[1:2] = cache.values[1:2] = mx.array(float("nan"))
    changed(together, positions, [0], [])
    changed(together, positions, [0], [3])
    assert cache.keys.shape[0] == 2 and mx.isfinite(cache.keys + cache.values).all().item()


def test_who_joins_or_leaves_is_all_that_is_copied() -> None:
    together, positions = one_layer([1500] * 16)
    all_bytes = sum(array.nbytes for array in cache_arrays(together))
    for stays, joins in (
        ([*range(3), *range(4, 16)], []),
        ([*range(15)], [40]),
        ([*range(16)], []),
    ):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        changed(together, positions, stays, joins)
        assert mx.get_peak_memory() - before < 0.4 * all_bytes
    assert sum(array.nbytes for array in cache_arrays(together)) == all_bytes


def test_a_long_one_that_left_takes_its_room_along() -> None:
    together, positions = one_layer([3000, 9, 20])
    changed(together, positions, [1, 2], [])
    assert together[0].keys.shape[2] == ROOM and positions.rows == [20, 9]


def test_no_array_of_a_state_that_was_not_kept_is_found_in_a_cache() -> None:
    window, states = mx.ones((2, 5, 4)), mx.ones((2, 2, 5, 4, 4))
    cache = BatchTapedCache(TapedCache(2))
    cache.cache = [window[:, 2:] * 7, states[1] * 7]
    cache.record(2, lambda _: [], lambda at: RowChoice(window, states, at))
    cache.keep(kept_row_index(mx.array([1, 2])))
    assert not any((array == 7).any().item() for array in cache_arrays([cache]))
