"""Caches of several requests for one forward, left-aligned: each request has its own rows behind
its own past, and rows that are dropped stay where they are until others take their place.

Nothing is moved when requests keep different numbers of rows, as those that draft do. mlx-lm's
batch caches are right-aligned, so there every request drops as many rows as any.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from .rollback import TapedCache

ROOM: Final = KVCache.step
"""Rows by which the room grows."""


class Positions:
    """The rows that each request has, shared by all layers of a model (or of a head)."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self._array: mx.array | None = None
        self._masks: dict[tuple[int, int, int | None], mx.array] = {}
        self._places: dict[int, mx.array] = {}

    @property
    def array(self) -> mx.array:
        """(B,) int32."""
        if self._array is None:
            self._array = mx.array(self.rows, dtype=mx.int32)
        return self._array

    def moved(self, rows: Sequence[int]) -> None:
        """Each request has so many rows more; fewer where negative."""
        self.rows = [have + more for have, more in zip(self.rows, rows, strict=True)]
        self._array = None
        self._masks.clear()
        self._places.clear()

    def places(self, rows: int) -> mx.array:
        """(B, 1, rows, 1): where a forward of so many rows writes."""
        if rows not in self._places:
            ahead = mx.arange(rows, dtype=mx.int32)
            self._places[rows] = (self.array[:, None] + ahead)[:, None, :, None]
        return self._places[rows]

    def mask(self, rows: int, window: int | None) -> mx.array:
        """(B, 1, rows, rows read): the past of each new row, no other request's and no dropped."""
        extent = self.extent(rows)
        key = (rows, extent, window)
        if key not in self._masks:
            places, past = self.places(rows), mx.arange(extent, dtype=mx.int32)
            seen = past <= places
            if window is not None:
                seen = seen & (past > places - window)
            self._masks[key] = seen
        return self._masks[key]

    def extent(self, rows: int) -> int:
        """Rows of the caches that a forward of `rows` rows reads."""
        return max(self.rows) + rows


class BatchKVCache:
    """What a layer of attention sees of a batch. Who runs the forward moves the positions."""

    left_aligned: Final = True
    """Kernels of our own read such buffers by `offset` alone, without the mask."""

    def __init__(
        self, keys: mx.array | None, values: mx.array | None, positions: Positions
    ) -> None:
        """`keys`, `values`: (B, heads, room, size); None before the first rows."""
        self.keys = keys
        self.values = values
        self._positions = positions

    @property
    def offset(self) -> mx.array:
        return self._positions.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = keys.shape[2]
        extent = self._positions.extent(rows)
        if self.keys is None or self.values is None:
            self.keys, self.values = (_with_room(a[:, :, :0], extent) for a in (keys, values))
        elif extent > self.keys.shape[2]:
            self.keys, self.values = (_with_room(a, extent) for a in (self.keys, self.values))
        at = self._positions.places(rows)
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
        at = mx.broadcast_to(at, values.shape)
        self.values = mx.put_along_axis(self.values, at, values, axis=2)
        return self.keys[..., :extent, :], self.values[..., :extent, :]

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """mlx-lm's; always an array, since requests differ."""
        del return_array
        return self._positions.mask(rows, window_size)

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> KVCache:
        """One request's, alone; views of these."""
        cache = KVCache()
        assert self.keys is not None and self.values is not None
        cache.offset = self._positions.rows[index]
        room = _rooms(cache.offset) * ROOM
        cache.keys, cache.values = (
            a[index : index + 1, :, :room] for a in (self.keys, self.values)
        )
        return cache


class BatchTapedCache(TapedCache):
    """Recurrent states (B, …), of which every request may take back rows of its own number."""

    def __init__(self, of: ArraysCache) -> None:
        """`of`: one request's."""
        super().__init__(len(of.cache))
        self._kind = type(of)

    def of(self, index: int) -> ArraysCache:
        """One request's, alone."""
        cache = self._kind(len(self.cache))
        cache.cache = [None if a is None else a[index : index + 1] for a in self.cache]
        return cache


BatchCache = BatchKVCache | BatchTapedCache


def can_batch(caches: Sequence[object]) -> bool:
    """Whether every layer's cache is of a kind that has a batch's counterpart here."""
    return all(type(c) is KVCache or type(c) in (TapedCache, ArraysCache) for c in caches)


def batched(requests: Sequence[Sequence[Any]], positions: Positions) -> list[BatchCache]:
    """One list of caches, by layer, for requests whose caches hold `positions` rows."""
    return [_batched(list(layer), positions) for layer in zip(*requests, strict=True)]


def take_back(caches: Sequence[BatchCache], rows: int, kept: Sequence[int]) -> None:
    """Of the `rows` rows that the last forward wrote for each request, `kept` stay.

    Rows of attention only stop counting: see `Positions.moved`.
    """
    if all(each == rows for each in kept):
        return
    of_each = mx.array(list(kept), dtype=mx.int32)
    for cache in caches:
        if isinstance(cache, BatchTapedCache):
            cache.keep(of_each)


def _batched(layer: list[Any], positions: Positions) -> BatchCache:
    if isinstance(layer[0], ArraysCache):
        joined = BatchTapedCache(layer[0])
        joined.cache = [
            _stacked(list(parts)) for parts in zip(*(c.cache for c in layer), strict=True)
        ]
        return joined
    if all(cache.keys is None for cache in layer):
        return BatchKVCache(None, None, positions)
    room = (_rooms(max(positions.rows)) + 1) * ROOM
    keys, values = (
        mx.concatenate(
            [_rows(held, count, room) for held, count in zip(parts, positions.rows, strict=True)]
        )
        for parts in ([c.keys for c in layer], [c.values for c in layer])
    )
    return BatchKVCache(keys, values, positions)


def _stacked(parts: list[mx.array | None]) -> mx.array | None:
    arrays = [part for part in parts if part is not None]
    return mx.concatenate(arrays) if arrays else None


def _rows(held: mx.array | None, count: int, room: int) -> mx.array:
    assert held is not None, "a request joins a batch behind its prompt"
    return _with_room(held[..., :count, :], room)


def _with_room(held: mx.array, rows: int) -> mx.array:
    room = _rooms(rows) * ROOM
    return mx.pad(held, [(0, 0), (0, 0), (0, room - held.shape[2]), (0, 0)])


def own(cache: KVCache | ArraysCache) -> None:
    """Replaces views of a batch's arrays by copies, so that those can go."""
    if isinstance(cache, KVCache):
        assert cache.keys is not None and cache.values is not None
        cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)
    else:
        cache.cache = [None if a is None else mx.contiguous(a) for a in cache.cache]


def _rooms(rows: int) -> int:
    return -(-rows // ROOM)


def padding_of(rows: Sequence[int]) -> float:
    """How many times as many rows a batch holds as its requests, which have `rows`, do alone."""
    rooms = [_rooms(each) for each in rows]
    return max(rooms) * len(rooms) / sum(rooms)
