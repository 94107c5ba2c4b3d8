"""The number of rows of each request in a batch, and the places and masks that follow from it."""

from collections.abc import Sequence

import mlx.core as mx


def counts_array(counts: Sequence[int]) -> mx.array:
    """`counts` as (B,) int32.

    A view of at least three numbers: MLX keeps arrays of up to eight bytes in memory that CUDA
    kernels read over the bus. Each layer of a single request waited microseconds for its count.
    """
    spare = max(0, 3 - len(counts))
    return mx.array([*counts, *[0] * spare], dtype=mx.int32)[: len(counts)]


class Positions:
    """The number of rows of each request, shared by all layers of a model or of a head."""

    on_device = False
    """Whether only `array` has the row counts, and `rows` has upper bounds."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self._array: mx.array | None = None
        self._masks: dict[tuple[int, int, int | None], mx.array] = {}
        self._places: dict[tuple[int, int], mx.array] = {}
        self._shifted: dict[tuple[int, ...], Positions] = {}

    @property
    def array(self) -> mx.array:
        """The row counts, (B,) int32."""
        if self._array is None:
            self._array = counts_array(self.rows)
        return self._array

    def advance(self, rows: Sequence[int]) -> None:
        """Adds `rows`, which may be negative, to the counts."""
        self.reset([a + b for a, b in zip(self.rows, rows, strict=True)])

    def reset(self, rows: Sequence[int]) -> None:
        """Replaces the counts, and with them the number of requests."""
        self.rows = list(rows)
        self._array = None
        self._masks.clear()
        self._places.clear()
        self._shifted.clear()

    def places(self, rows: int, slots: int = 0) -> mx.array:
        """(B, 1, rows, 1): where a forward of `rows` rows writes; 0 for slots beyond B."""
        spare = max(0, slots - len(self.rows))
        if (rows, spare) not in self._places:
            ahead = mx.arange(rows, dtype=mx.int32)
            places = mx.pad(self.array[:, None] + ahead, [(0, spare), (0, 0)])
            self._places[rows, spare] = places[:, None, :, None]
        return self._places[rows, spare]

    def mask(self, rows: int, window: int | None) -> mx.array:
        """(B, 1, rows, rows read): whether a new row attends to a row, which is its own request's
        past without rejected rows."""
        extent = self.extent(rows)
        key = (rows, extent, window)
        if key not in self._masks:
            places, past = self.places(rows), mx.arange(extent, dtype=mx.int32)
            mask = past <= places
            if window is not None:
                mask = mask & (past > places - window)
            self._masks[key] = mask
        return self._masks[key]

    def extent(self, rows: int) -> int:
        """Rows of the caches that a forward of `rows` rows reads."""
        return max(self.rows) + rows

    def counted_from(self, starts: tuple[int, ...]) -> "Positions":
        """The same rows, counted from the row `starts` of each request."""
        if starts not in self._shifted:
            counts = [rows - start for rows, start in zip(self.rows, starts, strict=True)]
            self._shifted[starts] = Positions(counts)
        return self._shifted[starts]
