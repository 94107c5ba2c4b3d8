"""Parts of a request's caches, kept apart from it and joined again for another one."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from ...mtp.rollback import TapedCache, cache_arrays


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys and values (1, heads, rows, size) of one layer."""

    keys: mx.array
    values: mx.array
    room: int
    """Rows that the cache had room for: kernels may be chosen by it."""

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


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
    return type(cache) is KVCache


def rows_of(cache: KVCache, begin: int, end: int) -> Rows:
    """A copy of the rows [begin, end)."""
    keys, values = cache.keys, cache.values
    assert keys is not None and values is not None
    parts = (mx.contiguous(held[..., begin:end, :]) for held in (keys, values))
    return Rows(*parts, room=keys.shape[2])


def state_of(cache: object) -> State:
    return State(_twin(cache))


def joined(parts: Sequence[Rows]) -> KVCache:
    """A cache of the rows of all parts, with the room of the last."""
    cache, room = KVCache(), parts[-1].room
    cache.offset = sum(part.keys.shape[2] for part in parts)
    rest = max(0, room - cache.offset)
    cache.keys = _with_room([part.keys for part in parts], rest)
    cache.values = _with_room([part.values for part in parts], rest)
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
