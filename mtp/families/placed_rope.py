"""Rotary positions of requests with images, for attention layers that know only an offset.

A row's position is its number and the request's `delta`, but for forwards that have rows of images:
all of their rows have positions in three dimensions. So after the prompt one integer for each
request is all that is left of its images.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn


class RopePositions:
    """The positions that the ropes of one model take in its next forwards.

    Who builds a forward's graph sets them before. At first they are those of text.
    """

    def __init__(self, section: Sequence[int] = (), *, joins_images: bool = False) -> None:
        """`section`: pairs of numbers of a head that turn with time, height and width, or empty if
        positions have one dimension. `joins_images`: see `join`."""
        self.section = tuple(section)
        self.joins_images = joins_images
        self.places: mx.array | None = None
        """(3, n): the positions of all rows of a forward with image rows, of one request."""
        self.deep: Sequence[mx.array] = ()
        """Additions to the outputs of the first layers, (1, n, H) each, in such a forward."""
        self.deltas: Sequence[int] = (0,)
        """One for each request; used if `places` is None."""
        self._later: mx.array | None = None
        """(n, n): whether a row sees one after it, or None if none does."""
        self._masks: dict[object, tuple[Any, mx.array]] = {}
        self._array: mx.array | None = None
        self._angles: dict[int, tuple[mx.array, mx.array]] = {}

    def set_deltas(self, deltas: Sequence[int]) -> None:
        """Differences of positions from row numbers, in forwards without image rows."""
        self.places, self.deep, self.deltas, self._array = None, (), deltas, None
        self._later = None

    def at(self, places: mx.array, deep: Sequence[mx.array] = ()) -> None:
        """Positions (3, n) of a forward of one request with image rows."""
        self.places, self.deep, self._later = places, deep, None
        self._angles.clear()

    def join(self, ids: Sequence[int]) -> None:
        """Lets the rows of an image see each other in the next forward, which has rows of `ids`.

        Rows that follow each other with ids below 0 are of one image. Without effect for a model
        whose image rows are causal.
        """
        if not self.joins_images or min(ids) >= 0:
            return
        images, number = list[int](), 0
        for row, token in enumerate(ids):
            number += token < 0 and (row == 0 or ids[row - 1] >= 0)
            images.append(number if token < 0 else 0)
        of = mx.array(images)
        rows = mx.arange(len(images))
        later = rows[:, None] < rows[None]
        self._later = later & (of[:, None] == of[None]) & (of > 0)[:, None]
        self._masks.clear()

    def joined(self, rows: int, mask: Any, cache: Any) -> Any:
        """The mask of a layer in the next forward, of `rows` rows; computed once for all layers
        that get the same. `cache` gives one where a layer gets the word "causal".

        A mask whose rows see rows after them has three dimensions, (1, n, keys): no row of it may
        be computed over the keys of a single step.
        """
        if self._later is None or rows == 1:
            return mask
        key = mask if isinstance(mask, str) else id(mask)
        if key not in self._masks:
            own_mask = (
                cache.make_mask(rows, window_size=None, return_array=True)
                if isinstance(mask, str)
                else mask
            )
            later = mx.pad(self._later[:rows, :rows], [(0, 0), (own_mask.shape[-1] - rows, 0)])
            self._masks[key] = mask, (own_mask | later)[None]
        return self._masks[key][1]

    def shifted(self, offset: int | mx.array) -> int | mx.array:
        """Positions of rows; `offset`: their numbers, of one request or (B,). Text keeps its own,
        so that it also keeps its kernels."""
        if not any(self.deltas):
            return offset
        if len(self.deltas) == 1:
            return offset + self.deltas[0]
        if self._array is None:
            self._array = mx.array(list(self.deltas), dtype=mx.int32)
        return offset + self._array

    def rows_after(self, offset: int | mx.array, batch: int, rows: int) -> mx.array:
        """The positions (3, B, n) of the rows of a forward after `offset`; see `shifted`."""
        if self.places is not None:
            return self.places[:, None]
        return mx.broadcast_to(row_numbers(self.shifted(offset), rows), (3, batch, rows))

    def angles(self, rope: "PlacedRope") -> tuple[mx.array, mx.array]:
        """cos and sin (n, dims / 2) of `places`, computed once for all layers."""
        assert self.places is not None
        if rope.dims not in self._angles:
            half = rope.dims // 2
            power = -mx.arange(half, dtype=mx.float32) / half
            every = self.places.astype(mx.float32)[..., None] * rope.base**power  # (3, n, half)
            axis = mx.array(_axes(self.section, half), dtype=mx.int32)
            chosen = mx.take_along_axis(every, axis[None, None], axis=0)[0]
            self._angles[rope.dims] = mx.cos(chosen), mx.sin(chosen)
        return self._angles[rope.dims]


def row_numbers(offset: int | mx.array, rows: int) -> mx.array:
    """(1 or B, n): the numbers of `rows` rows after `offset`."""
    first = offset[:, None] if isinstance(offset, mx.array) else offset
    return (first + mx.arange(rows, dtype=mx.int32)).reshape(-1, rows)


class PlacedRows:
    """A module whose rows have positions. `place_ropes` exchanges those of text."""

    positions = RopePositions()


class PlacedRope(PlacedRows, nn.RoPE):
    """mlx-lm's rope, at `RopePositions`. `place_ropes` makes one."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if self.positions.places is None:
            return super().__call__(x, offset=cast("int", self.positions.shifted(offset)))
        cos, sin = (each.astype(x.dtype) for each in self.positions.angles(self))
        a, b, rest = mx.split(x, [self.dims // 2, self.dims], axis=-1)
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def place_ropes(module: nn.Module, positions: RopePositions) -> None:
    """Gives the ropes of all layers in `module` their positions by `positions`; of a model that
    reads no images they stay as they are."""
    if not positions.section:
        return
    for _, each in module.named_modules():
        if type(each) is nn.RoPE and not each.traditional and each.scale == 1:
            each.__class__ = PlacedRope
        if isinstance(each, PlacedRows):
            each.positions = positions


class _DeepLayer(nn.Module):
    """A decoder layer whose output gets features of images added; see `RopePositions.deep`."""

    positions: RopePositions
    number: int

    def __call__(self, x: mx.array, *args: Any, **named: Any) -> mx.array:
        out = cast("Any", super()).__call__(x, *args, **named)
        deep = self.positions.deep
        return out + deep[self.number] if deep else out


class _WholeImageLayer(nn.Module):
    """A decoder layer, taking (x, mask, cache), under the mask of `RopePositions.joined`."""

    positions: RopePositions

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        mask = self.positions.joined(x.shape[1], mask, cache)
        return cast("Any", super()).__call__(x, mask, cache)


def deepen(layers: Sequence[nn.Module], positions: RopePositions) -> None:
    """Gives each of the model's first layers what `positions` adds to its output."""
    for number, layer in enumerate(layers):
        _derive(layer, _DeepLayer, positions=positions, number=number)


def see_whole_images(layers: Sequence[nn.Module], positions: RopePositions) -> None:
    """Gives layers the images of `positions`, for models whose image rows see all of their image.

    mlx-lm's text models are causal. In a forward with image rows a row also sees the rows of its
    image after it. Those in front are as in any mask, so a sliding window stays one. All rows of an
    image are in one forward.
    """
    for layer in layers:
        _derive(layer, _WholeImageLayer, positions=positions)


def _derive(layer: nn.Module, mixin: type[nn.Module], **attributes: Any) -> None:
    """Puts `mixin` in front of a layer's class, and sets attributes that it reads."""
    kind = type(layer)
    layer.__class__ = type(kind.__name__, (mixin, kind), {})
    for name, value in attributes.items():
        setattr(layer, name, value)


def is_in_three(rope: Any) -> bool:
    """Whether the next forward's positions have three dimensions."""
    return isinstance(rope, PlacedRope) and rope.positions.places is not None


def _axes(section: Sequence[int], half: int) -> list[int]:
    """The dimension of each pair's position: time, height, width in turn as far as height and width
    have pairs, and time."""
    axes = [0] * half
    for dimension in (1, 2):
        for pair in range(dimension, 3 * section[dimension], 3):
            axes[pair] = dimension
    return axes
