"""The cache of a layer with a sliding window, in the order of its rows, so that rows can be taken
back.

mlx-lm's ring overwrites its oldest row at each step: a rejected row cannot be undone, and attention
sums over the ring's order, which is another one in a block of rows. Here rows are left out in
groups of ALIGNED, always whole ones, and a mask hides what the window no longer reaches. So a block
of rows and single steps sum the same numbers in the same groups.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

STEP: Final = KVCache.step
"""Rows by which the room grows."""
ALIGNED: Final = 32
"""Forwards begin to read at multiples of this row: more than any sum takes at a time."""
MAX_ROLLBACK_ROWS: Final = 64
"""Longer forwards, which are chunks of prompts, are never rolled back."""


def oldest_row(offset: int, window: int) -> int:
    """The first row that a forward after `offset` rows reads, a multiple of ALIGNED.

    One row more than `window` is in reach: plamo3's mask asks for it.
    """
    return max(0, offset - window) // ALIGNED * ALIGNED


def oldest_kept_row(offset: int, window: int) -> int:
    """The first row that must stay so that MAX_ROLLBACK_ROWS can be taken back."""
    return oldest_row(max(0, offset - MAX_ROLLBACK_ROWS), window)


class KeySpan(NamedTuple):
    """The keys that one row reads in its single step, `first` to `end` of those that were read."""

    first: int
    end: int
    sees_all: bool = False
    """Whether the row's mask hides none of them; False where only the mask tells."""


def key_span(row: int, window: int, origin: int) -> KeySpan:
    """The span of the row after `row` rows, counted from row `origin`."""
    return KeySpan(oldest_row(row, window) - origin, row + 1 - origin, row < window)


class WindowCache(KVCache):
    """The last rows of one request; `keys` and `values` begin with row `start`."""

    def __init__(self, max_size: int) -> None:
        """`max_size`: rows that a row attends to, itself included."""
        super().__init__()
        self.max_size = max_size
        self.start = 0
        self._read_from = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        count = keys.shape[2]
        self._read_from = oldest_row(self.offset, self.max_size)
        place = self.offset - self.start
        if self.keys is None or place + count > self.keys.shape[2]:
            self._make_room(keys, values)
            place = self.offset - self.start
        assert self.keys is not None and self.values is not None
        self.keys[..., place : place + count, :] = keys
        self.values[..., place : place + count, :] = values
        self.offset += count
        return self.keys_and_values()

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        """Drops rows that no forward will read, and makes room for as many as `keys` has."""
        tail = self.trimmed()
        room = -(-(self.offset - tail.start + keys.shape[2]) // STEP) * STEP
        pairs = ((tail.keys, keys), (tail.values, values))
        self.keys, self.values = (
            _with_room(new[..., :0, :] if old is None else old, room) for old, new in pairs
        )
        self.start = tail.start

    def trimmed(self) -> "WindowCache":
        """A cache of views of the rows that later forwards may read."""
        cache = WindowCache(self.max_size)
        cache.offset = self.offset
        if self.keys is not None and self.values is not None:
            cache.start = max(self.start, oldest_kept_row(self.offset, self.max_size))
            rows = slice(cache.start - self.start, self.offset - self.start)
            cache.keys, cache.values = self.keys[..., rows, :], self.values[..., rows, :]
        return cache

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows that the last forward read, for layers that attend to another layer's cache."""
        assert self.keys is not None and self.values is not None
        rows = slice(self._read_from - self.start, self.offset - self.start)
        return self.keys[..., rows, :], self.values[..., rows, :]

    def key_spans(self, rows: int) -> list[KeySpan]:
        """The span of each of the last `rows` rows in the rows that the last forward read."""
        ends = range(self.offset - rows, self.offset)
        return [key_span(row, self.max_size, self._read_from) for row in ends]

    @property
    def state(self) -> tuple[Any, ...]:
        cache = self.trimmed()
        return cache.keys, cache.values, cache.offset, cache.start, cache.max_size

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        self.keys, self.values, self.offset, self.start, self.max_size = v

    def trim(self, n: int) -> int:
        """Takes up to `n` rows back; none where dropped rows would be read again."""
        rows = min(self.offset, n)
        if oldest_row(self.offset - rows, self.max_size) < self.start:
            return 0
        self.offset -= rows
        return rows

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | Literal["causal"] | None:
        """The mask of the next forward: an array from where a row is out of a row's reach."""
        window = self.max_size if window_size is None else window_size
        if self.offset + rows <= window and not return_array:
            return None if rows == 1 else "causal"
        past = self.offset - oldest_row(self.offset, self.max_size)
        if rows == 1:
            return mx.arange(past + 1)[None] > past - window
        return create_causal_mask(rows, past, window_size=window)


def with_windows(caches: Sequence[object]) -> list[Any]:
    """`caches`, which are empty, with a `WindowCache` in place of each ring."""
    return [
        WindowCache(c.max_size) if type(c) is RotatingKVCache and not c.keep else c for c in caches
    ]


def _with_room(rows: mx.array, room: int) -> mx.array:
    return mx.pad(rows, [(0, 0), (0, 0), (0, room - rows.shape[2]), (0, 0)])
