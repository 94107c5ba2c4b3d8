"""Parts of a request's caches, kept apart from it and joined again for another one."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from ...mtp.rollback import TapedCache, cache_arrays, holds_rows, state_arrays

RowCache = KVCache | QuantizedKVCache


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys and values of one layer, each (1, heads, rows, size).

    Quantised ones are three arrays each: the numbers, their scales and their biases. None where
    others hold the rows.
    """

    arrays: tuple[mx.array, ...]
    room: int
    """Rows that the cache had room for: kernels may be chosen by it."""
    quantised: tuple[int, int] | None = None
    """Numbers that share a scale, and bits of each number."""

    @property
    def count(self) -> int:
        return self.arrays[0].shape[2]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class State:
    """A cache that is not cut by rows: a recurrent state, a window. Nobody writes to it."""

    cache: Any

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in cache_arrays([self.cache]))

    def twin(self) -> Any:
        """A cache that may be written to."""
        return _twin(self.cache)


def has_rows(cache: object) -> bool:
    """Whether its rows can be kept one by one; else it is a state."""
    return holds_rows(cache)


def row_bytes(cache: RowCache) -> int:
    """What one row takes; 0 of a cache that holds none yet."""
    held = state_arrays(cache)
    return sum(array.nbytes for array in held) // held[0].shape[2] if held else 0


def rows_of(cache: RowCache, begin: int, end: int) -> Rows:
    """A copy of the rows [begin, end)."""
    seen = viewed(cache, begin, end)
    return replace(seen, arrays=tuple(mx.contiguous(array) for array in seen.arrays))


def viewed(cache: RowCache, begin: int, end: int) -> Rows:
    """The rows [begin, end) as they lie in the cache, which must not be written to meanwhile."""
    held = state_arrays(cache)
    return replace(form_of(cache), arrays=tuple(array[..., begin:end, :] for array in held))


def form_of(cache: RowCache) -> Rows:
    """What is to be known of rows that stay in the cache."""
    form = (cache.group_size, cache.bits) if isinstance(cache, QuantizedKVCache) else None
    held = state_arrays(cache)
    return Rows((), held[0].shape[2] if held else 0, form)


def taken(cache: RowCache, parts: Sequence[tuple[int, int]]) -> list[tuple[mx.array, ...]]:
    """Copies of the rows [begin, end) of each of `parts`. The cache loses its own meanwhile, its
    keys before its values are copied: what both hold at once is half of its rows."""
    copies = [list[mx.array]() for _ in parts]
    for half in ("keys", "values"):
        own = getattr(cache, half)
        held: list[mx.array] = [own] if isinstance(own, mx.array) else list(own)
        del own
        for copied, (begin, end) in zip(copies, parts, strict=True):
            copied += [mx.contiguous(array[..., begin:end, :]) for array in held]
        mx.eval(copies)
        setattr(cache, half, None)
        held.clear()
        mx.clear_cache()
    return [tuple(copied) for copied in copies]


def state_of(cache: object) -> State:
    return State(_twin(cache))


def joined(parts: list[Rows]) -> RowCache:
    """A cache of the rows of all parts, with the room of the last; evaluated.

    Empties `parts`: rows that nobody else holds go as they are joined.
    """
    form, room = parts[-1].quantised, parts[-1].room
    cache = KVCache() if form is None else QuantizedKVCache(*form)
    cache.offset = sum(part.count for part in parts)
    rest = max(0, room - cache.offset)
    columns = [list(arrays) for arrays in zip(*(p.arrays for p in parts), strict=True)]
    parts.clear()
    held = list[mx.array]()
    for column in columns:
        held.append(_with_room(column, rest))
        column.clear()
        mx.eval(held[-1])
    half = len(held) // 2
    if form is None:
        cache.keys, cache.values = held
    else:
        cache.keys, cache.values = tuple(held[:half]), tuple(held[half:])
    return cache


def _with_room(parts: Sequence[mx.array], rest: int) -> mx.array:
    batch, heads, _, size = parts[0].shape
    room = mx.zeros((batch, heads, rest, size), parts[0].dtype)
    return mx.concatenate([*parts, room], axis=2)


def _twin(cache: Any) -> Any:
    if not isinstance(cache, ArraysCache):
        return copy.deepcopy(cache)
    twin = copy.copy(cache)
    twin.cache = list(cache.cache)  # layers replace its arrays and write into none
    if isinstance(twin, TapedCache):
        twin.forget()  # a tape holds the arrays of a whole forward
    return twin
