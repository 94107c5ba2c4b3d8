"""Attention within images, for models whose image rows see all rows of their image.

mlx-lm's text models are causal. In a forward with image rows the decoder layers change the mask
that they get: a row of an image also sees the rows of the image after it. Those in front are as
in any mask, so a sliding window stays one. All rows of an image are in one forward.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from .placed_rope import RopePositions


class _WholeImageLayer:
    """A decoder layer under `RopePositions.joined`."""

    positions: RopePositions

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        mask = self.positions.joined(x.shape[1], mask, cache)
        return cast("Any", super()).__call__(x, mask, cache)


def see_whole_images(layers: Sequence[nn.Module], positions: RopePositions) -> None:
    """Gives layers that take an input, a mask and a cache the images of `positions`."""
    for layer in layers:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (_WholeImageLayer, kind), {})
        cast("Any", layer).positions = positions
