"""Rollback: removes rows from a model's caches, bit for bit as if they had never been written.

Attention caches are trimmed. A recurrent layer keeps no past rows: during a forward of several rows
it records the inputs of its recurrence (the tape), and the first m rows are replayed from the state
before. The recurrence is sequential in float32, so the replay repeats the same operations. Forwards
of more than MAX_ROLLBACK_ROWS leave no tape, which would keep all of their inputs in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from .window import WindowCache


class RowChoice(NamedTuple):
    """The states after every row of a kernel's forward, and the row that each request keeps, which
    may be known to the GPU alone. The next kernel begins there; nothing is copied."""

    window: mx.array
    """(B, n + 3, C): the convolution's rows."""
    states: mx.array
    """(n, B, v heads, v dim, k dim): the state after each row."""
    at: mx.array
    """(2, B) int32: see `DeltaKernel.rows`."""

    def arrays(self) -> "list[mx.array | None]":
        """The convolution's last rows and the state at the chosen rows, as a cache has them."""
        batch = self.at.shape[1]
        window = rows_of_each(self.window, self.at[1], self.window.shape[1] - self.states.shape[0])
        return [window, self.states[self.at[0], mx.arange(batch)]]


def rows_of_each(window: mx.array, first: mx.array, count: int) -> mx.array:
    """(B, count, …): `count` rows of each request, from its own `first` (B,) on."""
    at = first[:, None] + mx.arange(count)
    at = at.reshape(*at.shape, *[1] * (window.ndim - 2))
    return mx.take_along_axis(
        window, mx.broadcast_to(at, (*at.shape[:2], *window.shape[2:])), axis=1
    )


def kept_row_index(rows: mx.array) -> mx.array:
    """`RowChoice.at`, (2, B), if each request keeps `rows` (B,) of the last forward."""
    # A view of three rows: see `counts_array`.
    return mx.stack([rows - 1, rows, rows]).astype(mx.int32)[:2]


Restore = Callable[[int], list[mx.array | None]]
"""A cache's arrays after the first m rows of the last forward."""
RowCache = KVCache | QuantizedKVCache | CacheList
"""A cache that `holds_rows`."""
RestoreEach = Callable[[mx.array], "list[mx.array | None] | RowChoice"]
"""The same for a batch, given `RowChoice.at`."""
Swaps = Mapping[type[nn.Module], type[nn.Module]]
"""Layer classes of mlx-lm, and the classes that replace them so that a verify can be rolled back.
"""


class TapedCache(ArraysCache):
    """A recurrent layer's state, and a tape that restores earlier rows of the last forward."""

    def __init__(self, size: int) -> None:
        self.chosen: RowChoice | None = None
        """Set in place of `cache`, which is made of it when it is read."""
        super().__init__(size)
        self._tape: tuple[int, Restore, RestoreEach | None] | None = None

    @property
    def cache(self) -> list[mx.array | None]:
        if self.chosen is not None:
            self._arrays, self.chosen = self.chosen.arrays(), None
        return self._arrays

    @cache.setter
    def cache(self, arrays: list[mx.array | None]) -> None:
        self._arrays, self.chosen = arrays, None

    def record(self, rows: int, restore: Restore, each: RestoreEach | None = None) -> None:
        """Records a forward of `rows` rows; `restore(m)` gives the arrays after its first m rows.

        `each`: the same for a batch in which each request keeps its own number of rows, at least 1;
        see `keep`.
        """
        self._tape = (rows, restore, each)

    def extend_tape(
        self, restore: Restore, each: "Callable[[mx.array], list[mx.array | None]]"
    ) -> None:
        """Adds the arrays after those that the tape restores, if the forward left one."""
        if self._tape is None:
            return
        rows, first, first_of_each = self._tape

        def restore_each(at: mx.array) -> list[mx.array | None]:
            arrays = first_of_each(at) if first_of_each is not None else []
            return [*(arrays.arrays() if isinstance(arrays, RowChoice) else arrays), *each(at)]

        self.record(rows, lambda count: [*first(count), *restore(count)], restore_each)

    def forget(self) -> None:
        """Drops the tape."""
        self._tape = None

    def rollback(self, rows: int) -> None:
        """Drops the last `rows` rows; at most once after each forward."""
        if self._tape is None or not 0 <= rows <= self._tape[0]:
            raise AssertionError(f"cannot take {rows} rows back: the tape does not reach that far")
        total, restore, _ = self._tape
        if rows:  # a tape of one row holds nothing but the state before it
            self.cache = restore(total - rows)
        self._tape = None

    def keep(self, at: mx.array) -> None:
        """Keeps some rows of the last forward, at least 1 of each request. `at`: from
        `kept_row_index`."""
        each = None if self._tape is None else self._tape[2]
        if each is None:
            raise AssertionError("the last forward left no tape for a batch")
        restored = each(at)
        if isinstance(restored, RowChoice):
            # The arrays after the last row are no request's state and must not be read.
            self.cache = [None] * len(self._arrays)
            self.chosen = restored
        else:
            self.cache = restored
        self._tape = None


class TapedLayer(nn.Module):
    """A recurrent layer that records a tape in a `TapedCache`."""

    def by_stock(self, cache: TapedCache, rows: int, stock: Callable[[], mx.array]) -> mx.array:
        """`stock()`, mlx-lm's own computation: of one row, or of a chunk that leaves no tape."""
        before = list(cache.cache)
        out = stock()
        if rows == 1:
            cache.record(1, lambda _rows: before)
        else:
            cache.forget()
        return out


def swap_classes(module: nn.Module, swaps: Swaps) -> None:
    """Replaces the classes of all modules in `module`.

    Instances change class rather than the class its methods: weights stay as they are, and another
    model in the process, or another patch, is not touched.
    """
    for _, each in module.named_modules():
        if stand_in := swaps.get(type(each)):
            each.__class__ = stand_in


def takes_tapes(model: nn.Module) -> bool:
    """Whether the model's recurrent layers, if it has any, record tapes."""
    return any(isinstance(module, TapedLayer) for _, module in model.named_modules())


def with_tapes(caches: Sequence[object]) -> list[object]:
    """`caches`, which are empty, with a `TapedCache` in place of each recurrent one.

    For a model that `takes_tapes`: under other layers no tape is recorded, and a rollback fails.
    """
    return [TapedCache(len(c.cache)) if type(c) is ArraysCache else c for c in caches]


def parts_of(cache: object) -> Sequence[Any]:
    """The caches of a layer that has several, such as latents and an indexer's keys; else the cache
    itself."""
    return cache.caches if isinstance(cache, CacheList) else (cache,)


def cache_of(parts: Sequence[Any]) -> Any:
    """The cache whose `parts_of` they are, which stay the same objects."""
    return parts[0] if len(parts) == 1 else CacheList(*parts)


def holds_rows(cache: object) -> bool:
    """Whether a cache has one row for each token, quantised by itself if at all, so that a rollback
    only trims it."""
    if isinstance(cache, CacheList):
        return all(type(part) is KVCache for part in cache.caches)
    return type(cache) in (KVCache, QuantizedKVCache)


def can_trim(cache: object) -> bool:
    """Whether a rollback only trims the cache."""
    return holds_rows(cache) or type(cache) is WindowCache


def row_count(cache: RowCache) -> int:
    """Rows in a cache that `holds_rows`."""
    return cast("KVCache", parts_of(cache)[0]).offset


def fixed_kinds(caches: Sequence[object]) -> list[str]:
    """Names of the cache classes that cannot be rolled back, each once."""
    kinds = (type(c) for c in caches if not isinstance(c, TapedCache) and not can_trim(c))
    return sorted({kind.__name__ for kind in kinds})


def can_roll_back(caches: Sequence[object]) -> bool:
    """Whether `rollback` supports every layer's cache."""
    return not fixed_kinds(caches)


def rollback(caches: Sequence[object], rows: int) -> None:
    """Drops the last `rows` rows, which the last forward must have written, from every layer."""
    for cache in caches:
        if isinstance(cache, TapedCache):
            cache.rollback(rows)
        elif can_trim(cache):
            dropped = cast("RowCache", cache).trim(rows)
            if dropped != rows:
                raise AssertionError(f"asked to drop {rows} rows of {dropped}")
        else:
            raise AssertionError(f"{type(cache).__name__} cannot be rolled back")


def state_arrays(cache: ArraysCache | RowCache) -> list[mx.array]:
    """The arrays of one cache's state, in their order; none before its first row.

    Recurrent states, or keys and values (three arrays each if they are quantised) of each of its
    parts, as the cache's own methods resolve them. Arrays of attention may have more rows than
    `offset`.
    """
    if isinstance(cache, CacheList):
        return [array for part in cache.caches for array in state_arrays(part)]
    if isinstance(cache, ArraysCache):
        return [state for state in cache.cache if state is not None]
    return [array for half in (cache.keys, cache.values) for array in _arrays_in(half)]


def cache_arrays(caches: Sequence[object]) -> list[mx.array]:
    """Every array in the caches, in no particular order: to be evaluated or measured.

    It reads attributes, since `state` copies if a cache has spare rows. To read a state, use
    `state_arrays`: these arrays may have another form.
    """
    parts = (part for cache in caches for part in parts_of(cache))
    return [array for part in parts for array in _arrays_in(vars(part))]


def _arrays_in(value: object) -> Iterator[mx.array]:
    match value:
        case mx.array():
            yield value
        case Mapping():
            for each in cast("Mapping[object, object]", value).values():
                yield from _arrays_in(each)
        case list() | tuple():
            for each in cast("Sequence[object]", value):
                yield from _arrays_in(each)
        case _ if type(value).__module__.startswith("mlx_lm.models."):  # a cache in a CacheList
            yield from _arrays_in(vars(value))
        case _:
            pass
