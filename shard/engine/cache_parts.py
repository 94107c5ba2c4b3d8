"""Parts of a request's caches, kept apart from it and joined again for another one."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from ...mtp.rollback import TapedCache, cache_arrays, holds_rows, state_arrays

RowCache = KVCache | QuantizedKVCache


class KeptDraft(NamedTuple):
    """What the draft head holds behind a prefix; the ids of its rows are known otherwise."""

    cache: KVCache
    rows: int
    """Rows in the cache."""
    hidden: mx.array | None
    """The target's hidden states (1, n, H) of the rows behind those, which it has not read."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys and values of one layer, each (1, heads, rows, size).

    Quantised ones are three arrays each: the numbers, their scales and their biases.
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
    form = (cache.group_size, cache.bits) if isinstance(cache, QuantizedKVCache) else None
    copies = (mx.contiguous(array[..., begin:end, :]) for array in state_arrays(cache))
    return Rows(tuple(copies), room_of(cache), form)


def room_of(cache: RowCache) -> int:
    """Rows that the cache has room for."""
    held = state_arrays(cache)
    return held[0].shape[2] if held else 0


def state_of(cache: object) -> State:
    return State(_twin(cache))


def joined(parts: Sequence[Rows]) -> RowCache:
    """A cache of copies of the rows of all parts, with the room of the last; evaluated."""
    form = parts[-1].quantised
    cache = KVCache() if form is None else QuantizedKVCache(*form)
    cache.offset = sum(part.count for part in parts)
    rest = max(0, parts[-1].room - cache.offset)
    columns = zip(*(part.arrays for part in parts), strict=True)
    held = [_with_room(column, rest) for column in columns]
    mx.eval(held)
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
