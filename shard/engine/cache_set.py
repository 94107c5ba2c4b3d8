"""The KV caches of one or several requests over the same layers, behind one interface."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.batch_caches import (
    BatchCache,
    BatchKVCache,
    BatchTapedCache,
    Positions,
    batched,
    can_change,
    change_all,
    keep_of,
    own,
    take_back,
)
from ...mtp.batch_slots import SOON, Change
from ...mtp.rollback import TapedCache, cache_arrays, rollback

Part = tuple[list[Any], int]
"""The caches of one request, and the rows in them."""


class DevicePositions(Positions):
    """Row counts that only the device knows: `array` counts them, `rows` are upper bounds."""

    on_device = True

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(rows)
        self._array = mx.array(list(rows), dtype=mx.int32)

    def moved(self, rows: Sequence[int]) -> None:
        array = self.array
        super().moved(rows)
        self._array = array + mx.array(list(rows), dtype=mx.int32)

    def kept(self, rows: mx.array, most: int) -> None:
        """Each request has `rows` (B,) more rows, at most `most`."""
        array = self.array
        super().moved([most] * len(self.rows))
        self._array = array + rows

    def known(self, rows: Sequence[int]) -> None:
        """The host knows the counts now; nothing may be in flight."""
        self.become(rows)
        self._array = mx.array(list(rows), dtype=mx.int32)


class CacheSet:
    """The caches of N requests: mlx-lm's own for one request, left-aligned ones for several.

    So plain decoding of one request is mlx-lm's, bit for bit. A request whose row count stays on
    the device has left-aligned caches too, over the same arrays.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._form(parts)

    def _form(self, parts: Sequence[Part]) -> None:
        rows = [count for _, count in parts]
        self.positions = Positions(rows)
        self.is_own = len(parts) == 1
        """Whether the caches are one request's own."""
        if self.is_own:
            self.caches: list[Any] = list(parts[0][0])
        else:
            self.caches = list(batched([caches for caches, _ in parts], self.positions, SOON))

    @property
    def rows(self) -> list[int]:
        """The rows of each request; upper bounds while the device counts them."""
        return self.positions.rows

    @property
    def on_device(self) -> bool:
        """Whether the device counts the rows."""
        return self.positions.on_device

    def count_on_device(self) -> None:
        """From here on the device counts the rows of this one request. Copies nothing."""
        (rows,) = self.rows
        positions = DevicePositions([rows])
        self.caches = [_aligned(cache, positions) for cache in self.caches]
        self.positions, self.is_own = positions, False

    def count_here(self, rows: int) -> None:
        """Ends `count_on_device`: there are `rows` rows, and nothing is in flight."""
        assert isinstance(self.positions, DevicePositions)
        self.positions.known([rows])
        self.caches = [cache.of(0) for cache in self.caches]
        self.positions, self.is_own = Positions([rows]), True
        mx.eval(cache_arrays(self.caches))

    def keep(self, written: int, kept: Sequence[int] | mx.array) -> None:
        """Of the `written` rows of the last forward, the first `kept` of each request stay.

        An array (B,) of counts that only the device knows is for sets that are `on_device`. Own
        caches may keep none of their rows, others keep at least one.
        """
        if isinstance(kept, mx.array):
            assert isinstance(self.positions, DevicePositions)
            if written > 1:
                keep_of(self.caches, kept)
            self.positions.kept(kept, written)
            return
        self.positions.moved(kept)
        if self.is_own:
            if kept[0] < written:
                rollback(self.caches, written - kept[0])
        else:
            take_back(self.caches, written, kept)

    def drop(self, rows: int) -> None:
        """Drops the last `rows` rows of every request; attention caches only."""
        if not rows:
            return
        self.positions.moved([-rows] * len(self.rows))
        if self.is_own:
            rollback(self.caches, rows)

    def views(self) -> list[Any]:
        """The caches of a set of one request, to be looked at only."""
        return self.caches if self.is_own else [cache.of(0) for cache in self.caches]

    def extract(self, index: int) -> Part:
        """The caches of one request: copies, unless they are the only ones."""
        if self.is_own:
            return self.caches, self.rows[0]
        caches = [cache.of(index) for cache in self.caches]
        for cache in caches:
            own(cache)
        mx.eval(cache_arrays(caches))
        return caches, self.rows[index]

    def change(self, order: Sequence[int], joins: Sequence[Part]) -> None:
        """Nothing is in flight. `order`: the old index of each request that stays, see `order_of`.

        `joins` come behind them.
        """
        single = len(order) + len(joins) == 1
        if self.is_own or single or not order or not self._can_change:
            self._form([*(self.extract(index) for index in order), *joins])
            return
        rows = [*(self.rows[index] for index in order), *(count for _, count in joins)]
        change_all(self.caches, Change(order, rows), [caches for caches, _ in joins])
        self.positions.become(rows)

    @property
    def _can_change(self) -> bool:
        return can_change(self.caches) and all(cache_arrays([cache]) for cache in self.caches)


def _aligned(cache: Any, positions: Positions) -> BatchCache:
    """The left-aligned cache of one request, over the same arrays."""
    if isinstance(cache, TapedCache):
        joined = BatchTapedCache(cache)
        joined.cache = list(cache.cache)
        return joined
    assert type(cache) is KVCache
    return BatchKVCache(cache.keys, cache.values, positions)


def can_count_on_device(caches: Sequence[object]) -> bool:
    """Whether each layer's cache is of a kind whose rows the device can count."""
    return all(isinstance(cache, TapedCache) or type(cache) is KVCache for cache in caches)
