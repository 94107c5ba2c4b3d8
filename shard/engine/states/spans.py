"""Rows of prompts in the prefix cache, and the bytes that a request's caches take for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import KVCache

from ....mtp.caches.rollback import holds_rows, row_count
from .cache_parts import LayerRows, room_of, row_bytes, rows_of


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Copies of the rows [begin, end) of several layers."""

    begin: int
    end: int
    layers: tuple[LayerRows | None, ...]
    """None where a layer has no rows."""

    @classmethod
    def of(cls, caches: Sequence[Any], begin: int, end: int) -> "Span":
        """Copies rows of `caches`, which hold at least `end` rows."""
        layers = (rows_of(cache, begin, end) if holds_rows(cache) else None for cache in caches)
        return cls(begin, end, tuple(layers))

    @property
    def bytes(self) -> int:
        return sum(rows.bytes for rows in self.layers if rows is not None)

    @property
    def room(self) -> int:
        """Rows that the copied caches had room for."""
        return max((rows.room for rows in self.layers if rows is not None), default=0)


def rows_in(spans: Sequence[Span], layer: int) -> list[LayerRows]:
    """One layer's rows of all spans."""
    return [rows for span in spans if (rows := span.layers[layer]) is not None]


def bytes_of_row(caches: Sequence[Any]) -> int:
    """Bytes of one row of all layers that have rows."""
    return sum(row_bytes(cache) for cache in caches if holds_rows(cache))


def growth_of(caches: Sequence[Any], rows: int) -> int:
    """Upper bound of the bytes by which `rows` more rows grow the caches."""
    return sum(
        row_bytes(cache) * (_grown(row_count(cache), room_of(cache), rows) - room_of(cache))
        for cache in caches
        if holds_rows(cache)
    )


def joined_size(spans: Sequence[Span], rows: int) -> int:
    """Bytes of a cache that joins `spans`, which begin at row 0, and gets `rows` more rows."""
    if not spans:
        return 0
    last = spans[-1]
    room = _grown(last.end, max(last.end, last.room), rows)
    return last.bytes // (last.end - last.begin) * room


def _grown(offset: int, room: int, rows: int) -> int:
    """Upper bound of a cache's room after `rows` more rows: it grows by whole steps."""
    return room if offset + rows <= room else offset + rows + KVCache.step - 1
