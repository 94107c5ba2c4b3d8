"""Rows of a request's caches, copied for the prefix cache and joined for another request, and the
bytes that they take."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from ....mtp.caches.batch_caches import detach
from ....mtp.caches.rollback import (
    RowCache,
    TapedCache,
    cache_of,
    holds_rows,
    row_count,
    state_arrays,
)
from ....mtp.caches.window import WindowCache


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Keys and values of one layer, each (1, heads, rows, size).

    If they are quantised, each consists of three arrays: values, scales and biases. A layer of
    several caches has keys and values of each.
    """

    arrays: tuple[mx.array, ...]
    room: int
    """Rows that the cache had room for, which may decide between kernels."""
    quantised: tuple[int, int] | None = None
    """Group size and bits; None if they are not quantised."""

    @property
    def count(self) -> int:
        return self.arrays[0].shape[2]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def row_bytes(cache: RowCache) -> int:
    """Bytes of one row; 0 for an empty cache."""
    arrays = state_arrays(cache)
    return sum(array.nbytes for array in arrays) // arrays[0].shape[2] if arrays else 0


def rows_of(cache: RowCache, begin: int, end: int) -> LayerRows:
    """A copy of the rows [begin, end)."""
    form = (cache.group_size, cache.bits) if isinstance(cache, QuantizedKVCache) else None
    copies = (mx.contiguous(array[..., begin:end, :]) for array in state_arrays(cache))
    return LayerRows(tuple(copies), room_of(cache), form)


def room_of(cache: RowCache) -> int:
    """Rows that the cache has room for."""
    arrays = state_arrays(cache)
    return arrays[0].shape[2] if arrays else 0


def joined(parts: Sequence[LayerRows]) -> RowCache:
    """A cache of copies of the rows of all parts, with the room of the last; evaluated."""
    form = parts[-1].quantised
    rows = sum(part.count for part in parts)
    rest = max(0, parts[-1].room - rows)
    columns = zip(*(part.arrays for part in parts), strict=True)
    arrays = [_with_room(column, rest) for column in columns]
    mx.eval(arrays)
    if form is not None:
        cache = QuantizedKVCache(*form)
        half = len(arrays) // 2
        cache.keys, cache.values, cache.offset = tuple(arrays[:half]), tuple(arrays[half:]), rows
        return cache
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    caches = [_kv_cache(keys, values, rows) for keys, values in pairs]
    return cache_of(caches)


def _kv_cache(keys: mx.array, values: mx.array, rows: int) -> KVCache:
    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, rows
    return cache


def _with_room(parts: Sequence[mx.array], rest: int) -> mx.array:
    batch, heads, _, size = parts[0].shape
    room = mx.zeros((batch, heads, rest, size), parts[0].dtype)
    return mx.concatenate([*parts, room], axis=2)


def copied(cache: Any) -> Any:
    """A copy of a cache that is not divided by rows: a recurrent state, a window."""
    if isinstance(cache, WindowCache):
        cache = cache.trimmed()
        detach(cache)
        return cache
    if not isinstance(cache, ArraysCache):
        return copy.deepcopy(cache)
    twin = copy.copy(cache)
    twin.cache = list(cache.cache)  # layers replace its arrays and write into none
    if isinstance(twin, TapedCache):
        twin.forget()  # a tape holds the arrays of a whole forward
    return twin


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Copies of the rows [begin, end) of several layers."""

    begin: int
    end: int
    layers: tuple[LayerRows | None, ...]
    """None where a layer has no rows."""

    @classmethod
    def of(cls, caches: Sequence[Any], begin: int, end: int) -> "Span":
        """Copies rows of `caches`, which hold at least `end` rows."""
        layers = (rows_of(cache, begin, end) if holds_rows(cache) else None for cache in caches)
        return cls(begin, end, tuple(layers))

    @property
    def bytes(self) -> int:
        return sum(rows.bytes for rows in self.layers if rows is not None)

    @property
    def room(self) -> int:
        """Rows that the copied caches had room for."""
        return max((rows.room for rows in self.layers if rows is not None), default=0)


def rows_in(spans: Sequence[Span], layer: int) -> list[LayerRows]:
    """One layer's rows of all spans."""
    return [rows for span in spans if (rows := span.layers[layer]) is not None]


def bytes_of_row(caches: Sequence[Any]) -> int:
    """Bytes of one row of all layers that have rows."""
    return sum(row_bytes(cache) for cache in caches if holds_rows(cache))


def growth_of(caches: Sequence[Any], rows: int) -> int:
    """Upper bound of the bytes by which `rows` more rows grow the caches."""
    return sum(
        row_bytes(cache) * (_grown(row_count(cache), room_of(cache), rows) - room_of(cache))
        for cache in caches
        if holds_rows(cache)
    )


def joined_size(spans: Sequence[Span], rows: int) -> int:
    """Bytes of a cache that joins `spans`, which begin at row 0, and gets `rows` more rows."""
    if not spans:
        return 0
    last = spans[-1]
    room = _grown(last.end, max(last.end, last.room), rows)
    return last.bytes // (last.end - last.begin) * room


def _grown(offset: int, room: int, rows: int) -> int:
    """Upper bound of a cache's room after `rows` more rows: it grows by whole steps."""
    return room if offset + rows <= room else offset + rows + KVCache.step - 1
