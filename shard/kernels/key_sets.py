"""Measures up to how many rows and keys attention of a block has the bits of its rows alone.

Backends change the kernel of attention at some number of keys, of rows, or of rows times query
heads for each key head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.caches.batch_caches import left_aligned
from ...mtp.caches.positions import Positions
from ...mtp.caches.window import MAX_ROLLBACK_ROWS, WindowCache, oldest_kept_row
from .trial import random_rows

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 9, 16)
"""The numbers of rows that are compared, one in a batch alone: both sides of each known border."""
CONTEXTS: Final = (24, 200, 1000, 1022, 1100, 4000, 4094, 4200, 8190, 8200)
"""Rows before a block, ascending: from 1,022, 4,094 and 8,190 on it crosses a border."""
FIRST_BORDER: Final = 1000
"""A kernel for blocks does not change below. Blocks that differ there have none: their bits depend
on each number of keys, and agree at some by chance."""
_ALIGNMENTS: Final = (30, 62, 126)
"""Rows beyond a window after which the first key of a block's rows changes."""
_SHORT: Final = 9
"""Rows of a batch's shorter request."""

Attend = Callable[..., tuple[mx.array, mx.array]]
"""(q, keys, values, cache, mask, sinks) -> a block's attention at once, and row by row; lazy."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Everything of a call, but its rows and keys, that may decide the kernel."""

    heads: int
    key_heads: int
    size: int
    value_size: int
    dtype: mx.Dtype
    has_sinks: bool = False
    window: int = 0
    """Rows that a row attends to; 0: all."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        window = f", a window of {self.window}" if self.window else ""
        sinks = ", sinks" if self.has_sinks else ""
        return (
            f"attention of {self.heads} on {self.key_heads} heads of {self.size}, {kind}"
            f"{window}{sinks}"
        )

    @property
    def contexts(self) -> tuple[int, ...]:
        """The numbers of rows before the blocks that are compared."""
        if not self.window:
            return CONTEXTS
        borders = (self.window - 2, *(self.window + rows for rows in _ALIGNMENTS))
        short = (each for each in CONTEXTS if each < self.window)
        return tuple(sorted({24, *short, *(each for each in borders if each >= 0)}))


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Blocks of up to `rows` rows that read up to `keys` keys have the bits of their rows alone."""

    rows: int
    keys: int

    @property
    def is_all(self) -> bool:
        """Whether all blocks that were compared agree."""
        return self == _ALL

    def __str__(self) -> str:
        if not self.rows or not self.keys:
            return "blocks never have the bits of single rows"
        keys = "" if self.keys == _UNLIMITED else f" and of {self.keys} keys"
        return f"blocks of up to {self.rows} rows{keys} have the bits of single rows"


_UNLIMITED: Final = 1 << 40
_ALL: Final = RowLimits(WIDTHS[-1], _UNLIMITED)


def agreeing_limits(kind: AttentionKind, attend: Attend) -> RowLimits:
    """The limits of the rows and of the keys of blocks that agree with their rows alone."""
    first, *others = kind.contexts
    end = min(FIRST_BORDER, kind.window - 3) if kind.window else FIRST_BORDER
    short = [first, *(context for context in others if context <= end)]
    rows, keys = 0, 0
    for width in WIDTHS:
        if not all(_agrees(kind, attend, context, width) for context in short):
            break
        rows, keys = width, short[-1]
    for context in kind.contexts[len(short) :]:
        widths = [width for width in WIDTHS if width <= rows]
        if not widths or not all(_agrees(kind, attend, context, width) for width in widths):
            return RowLimits(rows, keys)
        keys = context
    return RowLimits(rows, _UNLIMITED)


def _agrees(kind: AttentionKind, attend: Attend, context: int, rows: int) -> bool:
    """Whether a block's attention has the bits of its rows alone, by itself and in a batch."""
    queries = random_rows((2, kind.heads, rows, kind.size), kind.dtype, 1)
    sinks = random_rows((kind.heads,), kind.dtype, 2) if kind.has_sinks else None
    new = [
        random_rows((2, kind.key_heads, rows, size), kind.dtype, 3 + i)
        for i, size in enumerate((kind.size, kind.value_size))
    ]
    alone = _cache_of(kind, context)
    together: Any = left_aligned(
        [[_cache_of(kind, context)], [_cache_of(kind, min(_SHORT, context))]],
        Positions([context, min(_SHORT, context)]),
    )[0]
    same = mx.array(True)
    for cache, size in ((alone, 1), (together, 2))[rows == 1 :]:
        mask = cache.make_mask(rows, return_array=False, window_size=None)
        read = cache.update_and_fetch(*(each[:size] for each in new))
        same &= mx.array_equal(*attend(queries[:size], *read, cache, mask, sinks))
    return bool(same.item())


def _cache_of(kind: AttentionKind, rows: int) -> Any:
    """A cache after `rows` random rows."""
    start = oldest_kept_row(rows, kind.window) if kind.window else 0
    past = [
        random_rows((1, kind.key_heads, rows - start + MAX_ROLLBACK_ROWS, size), kind.dtype, 5 + i)
        for i, size in enumerate((kind.size, kind.value_size))
    ]
    if not kind.window:
        cache = KVCache()
        cache.keys, cache.values = past
        cache.offset = rows
        return cache
    window = WindowCache(kind.window)
    window.state = (*past, rows, start, kind.window)
    return window
