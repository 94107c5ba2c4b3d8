"""Caches of several requests for one forward, left-aligned: each request writes after its own
rows, and rejected rows stay in place until others overwrite them.

So requests that draft may keep different numbers of rows, and nothing is moved. mlx-lm's batch
caches are right-aligned, so that all requests drop the same number of rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from .batch_slots import (
    ROOM,
    Change,
    append_rows,
    copy_moving,
    moved_forward,
    pad_rows,
    place_rows,
    reorder,
    room_for,
)
from .positions import Positions
from .rollback import (
    Restore,
    RestoreEach,
    TapedCache,
    holds_rows,
    kept_row_index,
    state_arrays,
)
from .window import KeySpan, WindowCache, key_span, oldest_kept_row


class _BatchRows:
    """The rows of a batch, in arrays (slots, heads, room, size) of keys and values. The caller of a
    forward advances the positions, which all layers share."""

    def __init__(self, arrays: Sequence[mx.array], positions: Positions) -> None:
        """`arrays`: of keys, then as many of values; none before the first rows."""
        self.arrays = list(arrays)
        self._positions = positions
        self._extent = 0

    @property
    def offset(self) -> mx.array:
        return self._positions.array

    @property
    def _counts(self) -> Positions:
        """The rows of each request in the arrays."""
        return self._positions

    def change(
        self, change: Change, moving: "Moving", joins: Sequence[KVCache | QuantizedKVCache]
    ) -> None:
        """Replaces members; see `change_all`."""
        mine, *others = _filled([self.arrays, *(state_arrays(cache) for cache in joins)])
        self.arrays = [
            place_rows(array, change, moving[i], [each[i] for each in others])
            for i, array in enumerate(mine)
        ]

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """The mask of the next forward, as in mlx-lm; always an array, since requests differ."""
        del return_array
        return self._counts.mask(rows, window_size)

    def is_trimmable(self) -> bool:
        return False

    def _append(self, new: Sequence[mx.array]) -> None:
        """Writes each request's rows, (B, heads, n, size) for each array, after its own."""
        arrays = self.arrays or [each[:, :, :0] for each in new]
        self.arrays = [
            append_rows(array, rows, self._counts) for array, rows in zip(arrays, new, strict=True)
        ]
        self._extent = self._counts.extent(new[0].shape[2])

    def _read(self) -> list[mx.array]:
        """The rows that the last forward read."""
        size = len(self._positions.rows)
        return [array[:size, :, : self._extent] for array in self.arrays]

    def _of(self, index: int) -> list[mx.array]:
        """Views of one request's rows."""
        room = room_for(self._counts.rows[index])
        return [array[index : index + 1, :, :room] for array in self.arrays]


class BatchKVCache(_BatchRows):
    """The KV cache of one attention layer for a batch."""

    left_aligned = True
    """Makes this project's kernels read the buffers by `offset` alone, without the mask."""

    @property
    def keys(self) -> mx.array | None:
        return self.arrays[0] if self.arrays else None

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.arrays[0] = array

    @property
    def values(self) -> mx.array | None:
        return self.arrays[1] if self.arrays else None

    @values.setter
    def values(self, array: mx.array) -> None:
        self.arrays[1] = array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._append((keys, values))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that the last forward read, for layers that attend to another layer's cache."""
        keys, values = self._read()
        return keys, values

    def key_spans(self, rows: int) -> list[list[KeySpan]] | None:
        """The span of each of the `rows` rows of each request in the rows that were read.

        Call it in a forward, after its rows were written. None where only the device counts them.
        """
        if self._positions.on_device:
            return None
        counts = self._positions.rows
        return [[KeySpan(0, count + i + 1, True) for i in range(rows)] for count in counts]

    def of(self, index: int) -> KVCache:
        """One request's cache, of views."""
        return self._fill(KVCache(), index)

    def _fill(self, cache: KVCache, index: int) -> KVCache:
        if self.arrays:
            cache.offset = self._positions.rows[index]
            cache.keys, cache.values = self._of(index)
        return cache


class BatchWindowCache(BatchKVCache):
    """The `WindowCache`s of a batch: the arrays begin with another row of each request."""

    left_aligned = False

    def __init__(
        self, of: Sequence[WindowCache], arrays: Sequence[mx.array], positions: Positions
    ) -> None:
        """`of`: the requests' own caches, whose first rows are those of `arrays`."""
        super().__init__(arrays, positions)
        self._size = of[0].max_size
        self._starts = tuple(cache.start for cache in of)

    @property
    def _counts(self) -> Positions:
        return self._positions.counted_from(self._starts)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._drop_rows(keys.shape[2])
        return super().update_and_fetch(keys, values)

    def _drop_rows(self, count: int) -> None:
        """Drops rows that no forward will read if there is no room for `count` more."""
        if not self.arrays or self._counts.extent(count) <= self.arrays[0].shape[2]:
            return
        pairs = zip(self._starts, self._positions.rows, strict=True)
        starts = tuple(max(start, oldest_kept_row(rows, self._size)) for start, rows in pairs)
        if starts == self._starts:
            return
        moves = [new - old for new, old in zip(starts, self._starts, strict=True)]
        self.arrays = [moved_forward(array, moves) for array in self.arrays]
        self._starts = starts

    def change(
        self, change: Change, moving: "Moving", joins: Sequence[KVCache | QuantizedKVCache]
    ) -> None:
        """Replaces members; see `change_all`."""
        parts = [cast("WindowCache", cache).trimmed() for cache in joins]
        staying = [self._starts[index] for index in change.order]
        self._starts = (*staying, *(part.start for part in parts))
        rows = [count - start for count, start in zip(change.rows, self._starts, strict=True)]
        super().change(Change(change.order, rows), moving, parts)

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """See `BatchKVCache.make_mask`."""
        self._drop_rows(rows)  # as the forward after the mask would
        return super().make_mask(rows, return_array, window_size or self._size)

    def key_spans(self, rows: int) -> list[list[KeySpan]]:
        """See `BatchKVCache.key_spans`."""
        pairs = zip(self._starts, self._positions.rows, strict=True)
        return [
            [key_span(count + i, self._size, start) for i in range(rows)] for start, count in pairs
        ]

    def of(self, index: int) -> WindowCache:
        """One request's cache, of views."""
        cache = WindowCache(self._size)
        cache.start = self._starts[index]
        _ = self._fill(cache, index)
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


class BatchQuantizedKVCache(_BatchRows):
    """The same with quantised rows, each by itself; three arrays of keys and three of values."""

    def __init__(
        self, of: QuantizedKVCache, arrays: Sequence[mx.array], positions: Positions
    ) -> None:
        """`of`: one request's cache."""
        super().__init__(arrays, positions)
        self.group_size: int = of.group_size
        self.bits: int = of.bits

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        halves = (mx.quantize(each, self.group_size, self.bits) for each in (keys, values))
        self._append([array for half in halves for array in half])
        read = tuple(self._read())
        return read[:3], read[3:]

    def of(self, index: int) -> QuantizedKVCache:
        """One request's cache, of views."""
        cache = QuantizedKVCache(self.group_size, self.bits)
        if self.arrays:
            cache.offset = self._positions.rows[index]
            arrays = tuple(self._of(index))
            cache.keys, cache.values = arrays[:3], arrays[3:]
        return cache


class BatchTapedCache(TapedCache):
    """Recurrent states (B, …), from which each request may roll back its own number of rows."""

    def __init__(self, of: ArraysCache) -> None:
        """`of`: one request's cache."""
        super().__init__(len(of.cache))
        self._kind = type(of)

    def record(self, rows: int, restore: Restore, each: RestoreEach | None = None) -> None:
        """See `TapedCache.record`. Each request keeps a row at least, so that the states before
        the forward, which `restore` refers to, are freed."""
        super().record(rows, _no_restore, each)

    def of(self, index: int) -> ArraysCache:
        """One request's cache, of views."""
        cache = self._kind(len(self.cache))
        cache.cache = [None if a is None else a[index : index + 1] for a in self.cache]
        return cache

    @property
    def arrays(self) -> list[mx.array]:
        """The states (B, …) after the kept rows, after resolving a choice made on the device."""
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


def _no_restore(rows: int) -> list[mx.array | None]:
    raise AssertionError(f"a batch keeps a row at least, not the first {rows} by itself")


BatchCache = BatchKVCache | BatchCacheList | BatchQuantizedKVCache | BatchTapedCache
Moving = Sequence[Sequence[mx.array]]
"""The results of `copy_moving` for each array of a cache."""
LoneCache = KVCache | CacheList | QuantizedKVCache | ArraysCache


def can_batch(caches: Sequence[object]) -> bool:
    """Whether every layer's cache has a counterpart for batches here."""
    kinds = (WindowCache, TapedCache, ArraysCache)
    return all(holds_rows(cache) or type(cache) in kinds for cache in caches)


def left_aligned(
    requests: Sequence[Sequence[Any]], positions: Positions, ahead: int = ROOM
) -> list[BatchCache]:
    """One list of caches, by layer, of requests whose own caches hold `positions` rows.

    There is room for `ahead` more rows of the longest request.
    """
    return [_align_layer(list(layer), positions, ahead) for layer in zip(*requests, strict=True)]


def change_all(
    caches: Sequence[BatchCache], change: Change, joins: Sequence[Sequence[LoneCache]]
) -> None:
    """Replaces members of caches; `joins`: by request, the caches of each layer.

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
    counts = positions.rows
    if isinstance(layer[0], WindowCache):
        layer = [cast("WindowCache", cache).trimmed() for cache in layer]
        counts = [rows - cache.start for cache, rows in zip(layer, counts, strict=True)]
    room = room_for(max(counts) + ahead)
    states = _filled([state_arrays(cache) for cache in layer])
    arrays = [
        mx.concatenate(
            [pad_rows(a[..., :rows, :], room) for a, rows in zip(parts, counts, strict=True)]
        )
        for parts in zip(*states, strict=True)
    ]
    if isinstance(layer[0], QuantizedKVCache):
        return BatchQuantizedKVCache(layer[0], arrays, positions)
    if isinstance(layer[0], WindowCache):
        return BatchWindowCache(layer, arrays, positions)
    return BatchKVCache(arrays, positions)


def _filled(states: Sequence[list[mx.array]]) -> list[list[mx.array]]:
    """The arrays (n, heads, rows, size) of each cache; one that has none gets those of another, for
    one request and with no rows."""
    like = next((arrays for arrays in states if arrays), [])
    return [arrays or [array[:1, :, :0] for array in like] for arrays in states]


def _stack(parts: list[mx.array | None]) -> mx.array | None:
    arrays = [part for part in parts if part is not None]
    return mx.concatenate(arrays) if arrays else None


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
