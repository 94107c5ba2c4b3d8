"""Parts of a request's caches, copied out of it for the prefix cache and joined for another one."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from ....mtp.caches.batch_caches import detach
from ....mtp.caches.rollback import RowCache, TapedCache, state_arrays
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
    return caches[0] if len(caches) == 1 else CacheList(*caches)


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
