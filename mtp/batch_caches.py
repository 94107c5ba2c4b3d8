"""Caches of several requests for one forward, left-aligned: each request has its own rows behind
its own past, and rows that are dropped stay where they are until others take their place.

Nothing is moved when requests keep different numbers of rows, as those that draft do. mlx-lm's
batch caches are right-aligned, so there every request drops as many rows as any.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from .batch_slots import ROOM, Change, lifted, lined_up, padded, room_for, seated
from .rollback import TapedCache, kept_rows, state_arrays


class Positions:
    """The rows that each request has, shared by all layers of a model (or of a head)."""

    on_device = False
    """Whether `array` alone tells how many rows there are, and `rows` no more than a bound."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self._array: mx.array | None = None
        self._masks: dict[tuple[int, int, int | None], mx.array] = {}
        self._places: dict[tuple[int, int], mx.array] = {}
        self._rings: dict[tuple[object, ...], mx.array] = {}

    @property
    def array(self) -> mx.array:
        """(B,) int32."""
        if self._array is None:
            self._array = mx.array(self.rows, dtype=mx.int32)
        return self._array

    def moved(self, rows: Sequence[int]) -> None:
        """Each request has so many rows more; fewer where negative."""
        self.become([have + more for have, more in zip(self.rows, rows, strict=True)])

    def become(self, rows: Sequence[int]) -> None:
        """Those of the requests from now on."""
        self.rows = list(rows)
        self._array = None
        self._masks.clear()
        self._places.clear()
        self._rings.clear()

    def places(self, rows: int, slots: int = 0) -> mx.array:
        """(B, 1, rows, 1): where a forward of so many rows writes; 0 for more `slots` than B."""
        spare = max(0, slots - len(self.rows))
        if (rows, spare) not in self._places:
            ahead = mx.arange(rows, dtype=mx.int32)
            places = mx.pad(self.array[:, None] + ahead, [(0, spare), (0, 0)])
            self._places[rows, spare] = places[:, None, :, None]
        return self._places[rows, spare]

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

    def ring_places(self, turned: tuple[int, ...], size: int) -> mx.array:
        """(B, 1, 1, 1): where one row goes in rings of `size`; see `BatchRotatingKVCache`."""
        key = (turned, size)
        if key not in self._rings:
            at = (self.array - mx.array(turned, dtype=mx.int32)) % size
            self._rings[key] = at[:, None, None, None]
        return self._rings[key]

    def ring_mask(self, turned: tuple[int, ...], size: int, window: int) -> mx.array:
        """(B, 1, 1, rows read): the last `window` rows of each request, the new one among them."""
        key = (turned, size, window)
        if key not in self._rings:
            slots = mx.arange(min(self.extent(1), size), dtype=mx.int32)
            age = (self.ring_places(turned, size) - slots) % size
            self._rings[key] = (age < window) & (age <= self.array[:, None, None, None])
        return self._rings[key]


class BatchKVCache:
    """What a layer of attention sees of a batch. Who runs the forward moves the positions."""

    left_aligned: Final = True
    """Kernels of our own read such buffers by `offset` alone, without the mask."""

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
        self.keys = _appended(self.keys, keys, self._positions)
        self.values = _appended(self.values, values, self._positions)
        self._extent = self._positions.extent(keys.shape[2])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """As the last rows found them: for layers that attend to those of another one."""
        assert self.keys is not None and self.values is not None
        size, extent = len(self._positions.rows), self._extent
        return self.keys[:size, :, :extent], self.values[:size, :, :extent]

    def change(self, change: Change, moving: "Moving", joins: Sequence[KVCache]) -> None:
        """See `change_all`, which tells nobody of the positions."""
        self.keys, self.values = _all_seated(self.arrays, change, moving, joins)

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
        if self.keys is None or self.values is None:
            return cache
        cache.offset = self._positions.rows[index]
        room = room_for(cache.offset)
        cache.keys, cache.values = (
            a[index : index + 1, :, :room] for a in (self.keys, self.values)
        )
        return cache


class BatchQuantizedKVCache:
    """As `BatchKVCache`, for rows that are quantised, each by itself."""

    def __init__(
        self, of: QuantizedKVCache, held: Sequence[mx.array], positions: Positions
    ) -> None:
        """`of`: one request's; `held`: keys and values, three arrays each, or none yet."""
        self.group_size: int = of.group_size
        self.bits: int = of.bits
        self._held: list[mx.array | None] = list(held) or [None] * 6
        self._positions = positions

    @property
    def offset(self) -> mx.array:
        return self._positions.array

    @property
    def arrays(self) -> list[mx.array]:
        """Three arrays of keys and three of values; none before the first rows."""
        return [array for array in self._held if array is not None]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        new = [a for each in (keys, values) for a in mx.quantize(each, self.group_size, self.bits)]
        pairs = zip(self._held, new, strict=True)
        held = [_appended(array, rows, self._positions) for array, rows in pairs]
        self._held = list(held)
        extent = self._positions.extent(keys.shape[2])
        read = tuple(array[: len(self._positions.rows), :, :extent] for array in held)
        return read[:3], read[3:]

    def change(self, change: Change, moving: "Moving", joins: Sequence[QuantizedKVCache]) -> None:
        """As `BatchKVCache.change`."""
        self._held = list(_all_seated(self.arrays, change, moving, joins))

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """As `BatchKVCache.make_mask`."""
        del return_array
        return self._positions.mask(rows, window_size)

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> QuantizedKVCache:
        """One request's, alone; views of these."""
        cache = QuantizedKVCache(self.group_size, self.bits)
        cache.offset = self._positions.rows[index]
        room = room_for(cache.offset)
        held = tuple(cast("mx.array", a)[index : index + 1, :, :room] for a in self._held)
        cache.keys, cache.values = held[:3], held[3:]
        return cache


class BatchRotatingKVCache:
    """A layer that attends to a window: each request's ring of rows, turned as it is alone.

    Attention sums over a ring in the order of its places, so those are kept. A ring forgets what
    it overwrites: requests write one row at a time, and none is taken back.
    """

    def __init__(self, rings: Sequence[RotatingKVCache], positions: Positions) -> None:
        """`rings`: by request, behind a prompt."""
        size = self._size = int(rings[0].max_size)
        self._positions = positions
        parts = [_ring_of(ring) for ring in rings]
        self._turned = tuple(
            0 if ring.offset < size else (ring.offset - next_place) % size
            for ring, (_, next_place) in zip(rings, parts, strict=True)
        )
        """By request: the row that lies at place 0, of every `size` rows."""
        room = min(size, room_for(max(arrays[0].shape[2] for arrays, _ in parts) + 1))
        self.keys, self.values = (
            mx.concatenate([padded(arrays[i], room) for arrays, _ in parts]) for i in (0, 1)
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
            self.keys, self.values = (padded(a, room) for a in (self.keys, self.values))
        at = self._positions.ring_places(self._turned, self._size)
        self.keys, self.values = (
            mx.put_along_axis(held, mx.broadcast_to(at, rows.shape), rows, axis=2)
            for held, rows in ((self.keys, keys), (self.values, values))
        )
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """As `BatchKVCache.keys_and_values`."""
        extent = min(self._positions.extent(1), self._size)
        return self.keys[..., :extent, :], self.values[..., :extent, :]

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """As `BatchKVCache.make_mask`, for one row."""
        del return_array
        if rows != 1:
            raise ValueError("a window in a batch takes one row at a time")
        window = self._size if window_size is None else window_size
        return self._positions.ring_mask(self._turned, self._size, window)

    def is_trimmable(self) -> bool:
        return False

    def of(self, index: int) -> RotatingKVCache:
        """One request's, alone; views of these."""
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

    @property
    def arrays(self) -> list[mx.array]:
        """The states (B, …) of the rows that were kept: a choice on the device is resolved."""
        return state_arrays(self)

    def change(self, change: Change, moving: "Moving", joins: Sequence[ArraysCache]) -> None:
        """As `BatchKVCache.change`; no row can be taken back behind it."""
        rows = [state_arrays(cache) for cache in joins]
        made = iter(
            [
                lined_up(held, change, moving[i], [each[i] for each in rows])
                for i, held in enumerate(self.arrays)
            ]
        )
        self.cache = [None if held is None else next(made) for held in self.cache]
        self.forget()


BatchCache = BatchKVCache | BatchQuantizedKVCache | BatchRotatingKVCache | BatchTapedCache
ChangingCache = BatchKVCache | BatchQuantizedKVCache | BatchTapedCache
Moving = Sequence[Sequence[mx.array]]
"""By array of a cache, what was `lifted`."""
LoneCache = KVCache | QuantizedKVCache | RotatingKVCache | ArraysCache


def can_batch(caches: Sequence[object]) -> bool:
    """Whether every layer's cache is of a kind that has a batch's counterpart here."""
    return all(
        (isinstance(c, RotatingKVCache) and not c.keep) or _reads_together(c) for c in caches
    )


def can_read_together(caches: Sequence[object]) -> bool:
    """The same for prompts: a window's rows are in another order then."""
    return all(_reads_together(c) for c in caches)


def _reads_together(cache: object) -> bool:
    return type(cache) in (KVCache, QuantizedKVCache, TapedCache, ArraysCache)


def batched(
    requests: Sequence[Sequence[Any]], positions: Positions, ahead: int = ROOM
) -> list[BatchCache]:
    """One list of caches, by layer, for requests whose caches hold `positions` rows.

    There is room for `ahead` more of the longest.
    """
    return [_batched(list(layer), positions, ahead) for layer in zip(*requests, strict=True)]


def can_change(caches: Sequence[BatchCache]) -> bool:
    """Whether requests may join and leave these where they are. Rings are turned differently."""
    return not any(isinstance(cache, BatchRotatingKVCache) for cache in caches)


def change_all(
    caches: Sequence[BatchCache], change: Change, joins: Sequence[Sequence[LoneCache]]
) -> None:
    """Those that stay change their places, and those with the caches `joins` come behind; of
    caches that `can_change`. Lazy, but for what moves. Who calls it tells the positions."""
    moving = [[lifted(held, change) for held in cache.arrays] for cache in caches]
    mx.eval(moving)
    for layer, cache in enumerate(caches):
        cast("Any", cache).change(change, moving[layer], [each[layer] for each in joins])


def take_back(caches: Sequence[BatchCache], rows: int, kept: Sequence[int]) -> None:
    """Of the `rows` rows that the last forward wrote for each request, `kept` stay.

    Rows of attention only stop counting: see `Positions.moved`.
    """
    if all(each == rows for each in kept):
        return
    keep_of(caches, mx.array(list(kept), dtype=mx.int32))


def keep_of(caches: Sequence[BatchCache], kept: mx.array) -> None:
    """Recurrent layers keep `kept` (B,) rows of the last forward, at least 1 of each request."""
    at = kept_rows(kept)
    for cache in caches:
        if isinstance(cache, BatchTapedCache):
            cache.keep(at)


def _all_seated(
    arrays: list[mx.array],
    change: Change,
    moving: Moving,
    joins: Sequence[KVCache | QuantizedKVCache],
) -> list[mx.array]:
    rows = [state_arrays(cache) for cache in joins]
    return [
        seated(held, change, moving[i], [each[i] for each in rows]) for i, held in enumerate(arrays)
    ]


def _batched(layer: list[Any], positions: Positions, ahead: int) -> BatchCache:
    if isinstance(layer[0], ArraysCache):
        joined = BatchTapedCache(layer[0])
        joined.cache = [
            _stacked(list(parts)) for parts in zip(*(c.cache for c in layer), strict=True)
        ]
        return joined
    if isinstance(layer[0], RotatingKVCache):
        return BatchRotatingKVCache(layer, positions)
    room = room_for(max(positions.rows) + ahead)
    each = [state_arrays(cache) for cache in layer]
    held = [
        mx.concatenate(
            [padded(a[..., :rows, :], room) for a, rows in zip(arrays, positions.rows, strict=True)]
        )
        for arrays in zip(*each, strict=True)
    ]
    if isinstance(layer[0], QuantizedKVCache):
        return BatchQuantizedKVCache(layer[0], held, positions)
    keys, values = held or (None, None)
    return BatchKVCache(keys, values, positions)


def _stacked(parts: list[mx.array | None]) -> mx.array | None:
    arrays = [part for part in parts if part is not None]
    return mx.concatenate(arrays) if arrays else None


def _ring_of(ring: RotatingKVCache) -> tuple[tuple[mx.array, mx.array], int]:
    """Its rows as its next single row finds them, and the place of that."""
    assert ring.keys is not None and ring.values is not None, "it joins a batch behind its prompt"
    size, held = ring.max_size, (ring.keys, ring.values)
    over = held[0].shape[2] - size
    if over > 0:  # behind a chunk it keeps more: mlx-lm drops them before the next row
        return (held[0][..., over:, :], held[1][..., over:, :]), 0
    rows = min(ring.offset, size)
    keys, values = (a[..., :rows, :] for a in held)
    return (keys, values), ring._idx % size  # pyright: ignore[reportPrivateUsage]


def _appended(held: mx.array | None, rows: mx.array, positions: Positions) -> mx.array:
    """(slots, heads, room, size) with each request's `rows` (B, …) behind its own."""
    count = rows.shape[2]
    extent = positions.extent(count)
    if held is None or extent > held.shape[2]:
        held = padded(rows[:, :, :0] if held is None else held, room_for(extent))
    if spare := held.shape[0] - rows.shape[0]:
        rows = mx.pad(rows, [(0, spare), (0, 0), (0, 0), (0, 0)])
    at = mx.broadcast_to(positions.places(count, held.shape[0]), rows.shape)
    return mx.put_along_axis(held, at, rows, axis=2)


def own(cache: LoneCache) -> None:
    """Replaces views of a batch's arrays by copies, so that those can go."""
    if isinstance(cache, ArraysCache):
        cache.cache = [None if a is None else mx.contiguous(a) for a in cache.cache]
    elif isinstance(cache, QuantizedKVCache):
        cache.keys, cache.values = (
            tuple(mx.contiguous(a) for a in cast("tuple[mx.array, ...]", held))
            for held in (cache.keys, cache.values)
        )
    elif cache.keys is not None and cache.values is not None:
        cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)
