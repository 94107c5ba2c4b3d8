"""The KV caches of one or several requests over the same layers, behind one interface."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from ....mtp.caches.batch_caches import (
    BatchCache,
    BatchCacheList,
    BatchKVCache,
    BatchTapedCache,
    change_all,
    detach,
    drop_rejected,
    keep_rows,
    left_aligned,
)
from ....mtp.caches.batch_slots import SOON, Change
from ....mtp.caches.positions import Positions, counts_array
from ....mtp.caches.rollback import TapedCache, cache_arrays, parts_of, rollback, state_arrays

Part = tuple[list[Any], int]
"""The caches of one request, and the rows in them."""


class DevicePositions(Positions):
    """Row counts that only the device knows: `array` has them, `rows` has upper bounds."""

    on_device = True

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(rows)
        self._array = counts_array(rows)

    def advance(self, rows: Sequence[int]) -> None:
        array = self.array
        super().advance(rows)
        self._array = array + mx.array(list(rows), dtype=mx.int32)

    def advance_by(self, rows: mx.array, most: int) -> None:
        """Adds `rows` (B,), at most `most`, to each request's count."""
        array = self.array
        super().advance([most] * len(self.rows))
        self._array = mx.repeat(array + rows, 3)[: len(self.rows)]  # see `counts_array`

    def settle(self, rows: Sequence[int]) -> None:
        """Sets the counts to `rows`, which the host has read; nothing may be in flight."""
        self.reset(rows)
        self._array = counts_array(rows)


class CacheSet:
    """The caches of N requests: mlx-lm's own for one request, left-aligned ones for several.

    So plain decoding of one request computes what mlx-lm does, bit for bit. One request whose row
    count stays on the device also has left-aligned caches, over the same arrays.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._form(parts)

    def _form(self, parts: Sequence[Part]) -> None:
        rows = [count for _, count in parts]
        self.positions = Positions(rows)
        self.is_own = len(parts) == 1
        """Whether the caches are mlx-lm's own, of one request."""
        if self.is_own:
            self.caches: list[Any] = list(parts[0][0])
        else:
            self.caches = list(left_aligned([caches for caches, _ in parts], self.positions, SOON))

    @property
    def rows(self) -> list[int]:
        """Rows of each request; upper bounds while the device counts them."""
        return self.positions.rows

    @property
    def on_device(self) -> bool:
        """Whether the device counts the rows."""
        return self.positions.on_device

    def count_on_device(self) -> None:
        """Lets the device count the rows of the only request. Copies nothing."""
        (rows,) = self.rows
        positions = DevicePositions([rows])
        self.caches = [_aligned(cache, positions) for cache in self.caches]
        self.positions, self.is_own = positions, False

    def count_here(self, rows: int) -> None:
        """Ends `count_on_device`. `rows`: the row count; nothing is in flight."""
        assert isinstance(self.positions, DevicePositions)
        self.positions.settle([rows])
        self.caches = [cache.of(0) for cache in self.caches]
        self.positions, self.is_own = Positions([rows]), True
        mx.eval(cache_arrays(self.caches))

    def keep(self, num_rows: int, kept_rows: Sequence[int] | mx.array) -> None:
        """Keeps the first `kept_rows` of each request's `num_rows` rows of the last forward.

        `kept_rows` is an array (B,) if the set is `on_device`. Own caches may keep no row, others
        keep at least one of each request.
        """
        if isinstance(kept_rows, mx.array):
            assert isinstance(self.positions, DevicePositions)
            if num_rows > 1:
                keep_rows(self.caches, kept_rows)
            self.positions.advance_by(kept_rows, num_rows)
            return
        self.positions.advance(kept_rows)
        if self.is_own:
            if kept_rows[0] < num_rows:
                rollback(self.caches, num_rows - kept_rows[0])
        else:
            drop_rejected(self.caches, num_rows, kept_rows)

    def drop(self, rows: int) -> None:
        """Drops the last `rows` rows of every request; attention caches only."""
        if not rows:
            return
        self.positions.advance([-rows] * len(self.rows))
        if self.is_own:
            rollback(self.caches, rows)

    def views(self) -> list[Any]:
        """The caches of a set of one request, to be read only."""
        return self.caches if self.is_own else [cache.of(0) for cache in self.caches]

    def extract(self, index: int) -> Part:
        """The caches of one request: copies, unless they are the only ones."""
        if self.is_own:
            return self.caches, self.rows[0]
        caches = [cache.of(index) for cache in self.caches]
        for cache in caches:
            detach(cache)
        mx.eval(cache_arrays(caches))
        return caches, self.rows[index]

    def change(self, order: Sequence[int], joins: Sequence[Part]) -> None:
        """Replaces members while nothing is in flight.

        `order`: the old index of each request that stays, see `order_of`; `joins` follow them.
        """
        single = len(order) + len(joins) == 1
        if self.is_own or single or not order or not self._has_arrays:
            self._form([*(self.extract(index) for index in order), *joins])
            return
        rows = [*(self.rows[index] for index in order), *(count for _, count in joins)]
        change_all(self.caches, Change(order, rows), [caches for caches, _ in joins])
        self.positions.reset(rows)

    @property
    def _has_arrays(self) -> bool:
        return all(cache_arrays([cache]) for cache in self.caches)


def _aligned(cache: Any, positions: Positions) -> BatchCache:
    """The left-aligned cache of one request, over the same arrays."""
    if isinstance(cache, TapedCache):
        joined = BatchTapedCache(cache)
        joined.cache = list(cache.cache)
        return joined
    if isinstance(cache, CacheList):
        return BatchCacheList(*(_aligned(part, positions) for part in cache.caches))
    assert type(cache) is KVCache
    return BatchKVCache(state_arrays(cache), positions)


def can_count_on_device(caches: Sequence[object]) -> bool:
    """Whether each layer's cache is of a kind whose rows the device can count."""
    parts = (part for cache in caches for part in parts_of(cache))
    return all(isinstance(part, TapedCache) or type(part) is KVCache for part in parts)
