"""Caches of several requests for one forward, left-aligned: each request writes behind its own
rows, and rejected rows stay in place until others overwrite them.

So requests that draft may keep different numbers of rows, and nothing is moved. mlx-lm's batch
caches are right-aligned, so that all requests drop the same number of rows.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .batch_slots import ROOM, Change, copy_moving, pad_rows, place_rows, reorder, room_for
from .positions import Positions
from .rollback import TapedCache, holds_rows, kept_row_index, state_arrays


class BatchKVCache:
    """The KV cache of one attention layer for a batch. The caller of a forward advances the
    positions, which all layers share."""

    left_aligned: Final = True
    """Makes this project's kernels read the buffers by `offset` alone, without the mask."""

    def __init__(
        self, keys: mx.array | None, values: mx.array | None, positions: Positions
    ) -> None:
        """`keys`, `values`: (slots, heads, room, size); None before the first rows."""
        self.keys = keys
        self.values = values
        self._positions = positions
        self._extent = 0

    @property
    def offset(self) -> mx.array:
        return self._positions.array

    @property
    def known_rows(self) -> list[int] | None:
        """The rows of each request; None where only the device counts them."""
        return None if self._positions.on_device else self._positions.rows

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values, (slots, heads, room, size); none before the first rows."""
        return [array for array in (self.keys, self.values) if array is not None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = _append_rows(self.keys, keys, self._positions)
        self.values = _append_rows(self.values, values, self._positions)
        self._extent = self._positions.extent(keys.shape[2])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that the last forward read, for layers that attend to another layer's cache."""
        assert self.keys is not None and self.values is not None
        size, extent = len(self._positions.rows), self._extent
        return self.keys[:size, :, :extent], self.values[:size, :, :extent]

    def change(self, change: Change, moving: "Moving", joins: Sequence[KVCache]) -> None:
        """Replaces members; see `change_all`."""
        self.keys, self.values = _all_placed(self.arrays, change, moving, joins)

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """The mask of the next forward, as in mlx-lm; always an array, since requests differ."""
        del return_array
        return self._positions.mask(rows, window_size)

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> KVCache:
        """One request's cache, of views."""
        cache = KVCache()
        if self.keys is None or self.values is None:
            return cache
        cache.offset = self._positions.rows[index]
        room = room_for(cache.offset)
        cache.keys, cache.values = (
            a[index : index + 1, :, :room] for a in (self.keys, self.values)
        )
        return cache


class BatchCacheList(CacheList):
    """The `BatchKVCache` of each part of a layer's cache."""

    caches: tuple[BatchKVCache, ...]

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values of each part; none before the first rows."""
        return [array for part in self.caches for array in part.arrays]

    def change(self, change: Change, moving: "Moving", joins: Sequence[CacheList]) -> None:
        """Replaces members; see `change_all`."""
        for i, part in enumerate(self.caches):
            part.change(change, moving[2 * i : 2 * i + 2], [each.caches[i] for each in joins])

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> CacheList:
        """One request's cache, of views."""
        return CacheList(*(part.of(index) for part in self.caches))


class BatchQuantizedKVCache:
    """A `BatchKVCache` of quantised rows, each quantised by itself."""

    def __init__(
        self, of: QuantizedKVCache, arrays: Sequence[mx.array], positions: Positions
    ) -> None:
        """`of`: one request's cache. `arrays`: three arrays each, or none."""
        self.group_size: int = of.group_size
        self.bits: int = of.bits
        self._arrays: list[mx.array | None] = list(arrays) or [None] * 6
        self._positions = positions

    @property
    def offset(self) -> mx.array:
        return self._positions.array

    @property
    def arrays(self) -> list[mx.array]:
        """Three arrays of keys and three of values; none before the first rows."""
        return [array for array in self._arrays if array is not None]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        new = [a for each in (keys, values) for a in mx.quantize(each, self.group_size, self.bits)]
        pairs = zip(self._arrays, new, strict=True)
        arrays = [_append_rows(array, rows, self._positions) for array, rows in pairs]
        self._arrays = list(arrays)
        extent = self._positions.extent(keys.shape[2])
        read = tuple(array[: len(self._positions.rows), :, :extent] for array in arrays)
        return read[:3], read[3:]

    def change(self, change: Change, moving: "Moving", joins: Sequence[QuantizedKVCache]) -> None:
        """Replaces members; see `change_all`."""
        self._arrays = list(_all_placed(self.arrays, change, moving, joins))

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """See `BatchKVCache.make_mask`."""
        del return_array
        return self._positions.mask(rows, window_size)

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> QuantizedKVCache:
        """One request's cache, of views."""
        cache = QuantizedKVCache(self.group_size, self.bits)
        cache.offset = self._positions.rows[index]
        room = room_for(cache.offset)
        arrays = tuple(cast("mx.array", a)[index : index + 1, :, :room] for a in self._arrays)
        cache.keys, cache.values = arrays[:3], arrays[3:]
        return cache


class BatchRotatingKVCache:
    """The caches of a layer with a sliding window: a ring of rows for each request.

    Attention sums over a ring in the order of its places, so each request's rows keep the places
    that they have in its own ring. Overwritten rows are lost: requests write one row at a time, and
    none can be rolled back.
    """

    def __init__(self, rings: Sequence[RotatingKVCache], positions: Positions) -> None:
        """`rings`: the requests' own caches, each behind its prompt."""
        size = self._size = int(rings[0].max_size)
        self._positions = positions
        parts = [_ring_of(ring) for ring in rings]
        self._turned = tuple(
            0 if ring.offset < size else (ring.offset - next_place) % size
            for ring, (_, next_place) in zip(rings, parts, strict=True)
        )
        """The row at place 0, modulo the ring's size, by request."""
        room = min(size, room_for(max(arrays[0].shape[2] for arrays, _ in parts) + 1))
        self.keys, self.values = (
            mx.concatenate([pad_rows(arrays[i], room) for arrays, _ in parts]) for i in (0, 1)
        )

    @property
    def offset(self) -> mx.array:
        return self._positions.array

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values, (B, heads, room, size)."""
        return [self.keys, self.values]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[2] != 1:
            raise ValueError("a window in a batch takes one row at a time")
        extent = min(self._positions.extent(1), self._size)
        if extent > self.keys.shape[2]:
            room = min(self._size, room_for(extent))
            self.keys, self.values = (pad_rows(a, room) for a in (self.keys, self.values))
        at = self._positions.ring_places(self._turned, self._size)
        self.keys, self.values = (
            mx.put_along_axis(array, mx.broadcast_to(at, rows.shape), rows, axis=2)
            for array, rows in ((self.keys, keys), (self.values, values))
        )
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """See `BatchKVCache.keys_and_values`."""
        extent = min(self._positions.extent(1), self._size)
        return self.keys[..., :extent, :], self.values[..., :extent, :]

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """See `BatchKVCache.make_mask`; for one row only."""
        del return_array
        if rows != 1:
            raise ValueError("a window in a batch takes one row at a time")
        window = self._size if window_size is None else window_size
        return self._positions.ring_mask(self._turned, self._size, window)

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> RotatingKVCache:
        """One request's cache, of views."""
        cache = RotatingKVCache(self._size)
        rows = cache.offset = self._positions.rows[index]
        room = min(self._size, room_for(rows))
        cache.keys, cache.values = (
            a[index : index + 1, :, :room] for a in (self.keys, self.values)
        )
        last = (rows - 1 - self._turned[index]) % self._size
        cache._idx = last + 1  # pyright: ignore[reportPrivateUsage]
        return cache


class BatchTapedCache(TapedCache):
    """Recurrent states (B, …), from which each request may roll back its own number of rows."""

    def __init__(self, of: ArraysCache) -> None:
        """`of`: one request's cache."""
        super().__init__(len(of.cache))
        self._kind = type(of)

    def of(self, index: int) -> ArraysCache:
        """One request's cache, of views."""
        cache = self._kind(len(self.cache))
        cache.cache = [None if a is None else a[index : index + 1] for a in self.cache]
        return cache

    @property
    def arrays(self) -> list[mx.array]:
        """The states (B, …) behind the kept rows, after resolving a choice made on the device."""
        return state_arrays(self)

    def change(self, change: Change, moving: "Moving", joins: Sequence[ArraysCache]) -> None:
        """Replaces members; see `change_all`. Earlier rows cannot be rolled back afterwards."""
        rows = [state_arrays(cache) for cache in joins]
        changed = iter(
            [
                reorder(array, change, moving[i], [each[i] for each in rows])
                for i, array in enumerate(self.arrays)
            ]
        )
        self.cache = [None if array is None else next(changed) for array in self.cache]
        self.forget()


BatchCache = (
    BatchKVCache | BatchCacheList | BatchQuantizedKVCache | BatchRotatingKVCache | BatchTapedCache
)
ChangingCache = BatchKVCache | BatchCacheList | BatchQuantizedKVCache | BatchTapedCache
Moving = Sequence[Sequence[mx.array]]
"""The results of `copy_moving` for each array of a cache."""
LoneCache = KVCache | CacheList | QuantizedKVCache | RotatingKVCache | ArraysCache


def can_batch(caches: Sequence[object]) -> bool:
    """Whether every layer's cache has a counterpart for batches here."""
    return all((isinstance(c, RotatingKVCache) and not c.keep) or _has_rows(c) for c in caches)


def can_batch_prompts(caches: Sequence[object]) -> bool:
    """Whether prompts can be read in batches: not by windows, whose rows would change places."""
    return all(_has_rows(c) for c in caches)


def _has_rows(cache: object) -> bool:
    return holds_rows(cache) or type(cache) in (TapedCache, ArraysCache)


def left_aligned(
    requests: Sequence[Sequence[Any]], positions: Positions, ahead: int = ROOM
) -> list[BatchCache]:
    """One list of caches, by layer, of requests whose own caches hold `positions` rows.

    There is room for `ahead` more rows of the longest request.
    """
    return [_align_layer(list(layer), positions, ahead) for layer in zip(*requests, strict=True)]


def can_change(caches: Sequence[BatchCache]) -> bool:
    """Whether requests may join and leave in place: not with rings, whose places differ."""
    return not any(isinstance(cache, BatchRotatingKVCache) for cache in caches)


def change_all(
    caches: Sequence[BatchCache], change: Change, joins: Sequence[Sequence[LoneCache]]
) -> None:
    """Replaces members of caches that `can_change`; `joins`: by request, the caches of each layer.

    Lazy, except for rows that change their places. The caller resets the positions.
    """
    moving = [[copy_moving(array, change) for array in cache.arrays] for cache in caches]
    mx.eval(moving)
    for layer, cache in enumerate(caches):
        cast("Any", cache).change(change, moving[layer], [each[layer] for each in joins])


def drop_rejected(caches: Sequence[BatchCache], rows: int, kept_rows: Sequence[int]) -> None:
    """Keeps `kept_rows` of each request's `rows` rows of the last forward, in recurrent layers.

    Rejected rows of attention layers are no longer counted: see `Positions.advance`.
    """
    if all(each == rows for each in kept_rows):
        return
    keep_rows(caches, mx.array(list(kept_rows), dtype=mx.int32))


def keep_rows(caches: Sequence[BatchCache], row_counts: mx.array) -> None:
    """Keeps `row_counts` (B,) rows of the last forward in recurrent layers, at least 1 each."""
    at = kept_row_index(row_counts)
    for cache in caches:
        if isinstance(cache, BatchTapedCache):
            cache.keep(at)


def _all_placed(
    arrays: list[mx.array],
    change: Change,
    moving: Moving,
    joins: Sequence[KVCache | QuantizedKVCache],
) -> list[mx.array]:
    rows = [state_arrays(cache) for cache in joins]
    return [
        place_rows(array, change, moving[i], [each[i] for each in rows])
        for i, array in enumerate(arrays)
    ]


def _align_layer(layer: list[Any], positions: Positions, ahead: int) -> BatchCache:
    if isinstance(layer[0], ArraysCache):
        joined = BatchTapedCache(layer[0])
        joined.cache = [
            _stack(list(parts)) for parts in zip(*(c.cache for c in layer), strict=True)
        ]
        return joined
    if isinstance(layer[0], CacheList):
        parts = zip(*(cache.caches for cache in layer), strict=True)
        return BatchCacheList(*(_align_layer(list(each), positions, ahead) for each in parts))
    if isinstance(layer[0], RotatingKVCache):
        return BatchRotatingKVCache(layer, positions)
    room = room_for(max(positions.rows) + ahead)
    states = [state_arrays(cache) for cache in layer]
    arrays = [
        mx.concatenate(
            [
                pad_rows(a[..., :rows, :], room)
                for a, rows in zip(parts, positions.rows, strict=True)
            ]
        )
        for parts in zip(*states, strict=True)
    ]
    if isinstance(layer[0], QuantizedKVCache):
        return BatchQuantizedKVCache(layer[0], arrays, positions)
    keys, values = arrays or (None, None)
    return BatchKVCache(keys, values, positions)


def _stack(parts: list[mx.array | None]) -> mx.array | None:
    arrays = [part for part in parts if part is not None]
    return mx.concatenate(arrays) if arrays else None


def _ring_of(ring: RotatingKVCache) -> tuple[tuple[mx.array, mx.array], int]:
    """The rows of a ring as its next single row finds them, and the place of that row."""
    assert ring.keys is not None and ring.values is not None, "it joins a batch behind its prompt"
    size, arrays = ring.max_size, (ring.keys, ring.values)
    over = arrays[0].shape[2] - size
    if over > 0:  # after a chunk it has more: mlx-lm drops them before the next row
        return (arrays[0][..., over:, :], arrays[1][..., over:, :]), 0
    rows = min(ring.offset, size)
    keys, values = (a[..., :rows, :] for a in arrays)
    return (keys, values), ring._idx % size  # pyright: ignore[reportPrivateUsage]


def _append_rows(array: mx.array | None, rows: mx.array, positions: Positions) -> mx.array:
    """Writes each request's `rows` (B, …) behind its own, into (slots, heads, room, size)."""
    count = rows.shape[2]
    extent = positions.extent(count)
    if array is None or extent > array.shape[2]:
        array = pad_rows(rows[:, :, :0] if array is None else array, room_for(extent))
    if spare := array.shape[0] - rows.shape[0]:
        rows = mx.pad(rows, [(0, spare), (0, 0), (0, 0), (0, 0)])
    at = mx.broadcast_to(positions.places(count, array.shape[0]), rows.shape)
    return mx.put_along_axis(array, at, rows, axis=2)


def detach(cache: LoneCache) -> None:
    """Replaces views of a batch's arrays by copies, so that the batch can be freed."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            detach(part)
    elif isinstance(cache, ArraysCache):
        cache.cache = [None if a is None else mx.contiguous(a) for a in cache.cache]
    elif isinstance(cache, QuantizedKVCache):
        cache.keys, cache.values = (
            tuple(mx.contiguous(a) for a in cast("tuple[mx.array, ...]", half))
            for half in (cache.keys, cache.values)
        )
    elif cache.keys is not None and cache.values is not None:
        cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)
