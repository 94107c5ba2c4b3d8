"""Rows of kept prompts, and the bytes that the caches of a request take for theirs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import KVCache

from .cache_parts import Rows, has_rows, room_of, row_bytes, rows_of


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Copies of the rows [begin, end) of several layers."""

    begin: int
    end: int
    layers: tuple[Rows | None, ...]
    """None where a layer has no rows."""

    @classmethod
    def of(cls, caches: Sequence[Any], begin: int, end: int) -> "Span":
        """Of caches that hold those rows."""
        layers = (rows_of(cache, begin, end) if has_rows(cache) else None for cache in caches)
        return cls(begin, end, tuple(layers))

    @property
    def bytes(self) -> int:
        return sum(rows.bytes for rows in self.layers if rows is not None)

    @property
    def room(self) -> int:
        """Rows that the caches had room for."""
        return max((rows.room for rows in self.layers if rows is not None), default=0)


def rows_in(spans: Sequence[Span], layer: int) -> list[Rows]:
    """One layer's rows of all of them."""
    return [rows for span in spans if (rows := span.layers[layer]) is not None]


def bytes_of_row(caches: Sequence[Any]) -> int:
    return sum(row_bytes(cache) for cache in caches if has_rows(cache))


def growth_of(caches: Sequence[Any], rows: int) -> int:
    """Bytes that caches grow by at most with `rows` rows more, by forwards of any size."""
    return sum(
        row_bytes(cache) * (_grown(cache.offset, room_of(cache), rows) - room_of(cache))
        for cache in caches
        if has_rows(cache)
    )


def joined_size(spans: Sequence[Span], rows: int) -> int:
    """Bytes of a cache of all of `spans`, which begin at row 0, once it has `rows` rows more."""
    if not spans:
        return 0
    last = spans[-1]
    room = _grown(last.end, max(last.end, last.room), rows)
    return last.bytes // (last.end - last.begin) * room


def _grown(offset: int, room: int, rows: int) -> int:
    """Rows that a cache has room for at most with `rows` rows more: it grows by whole steps."""
    return room if offset + rows <= room else offset + rows + KVCache.step - 1
