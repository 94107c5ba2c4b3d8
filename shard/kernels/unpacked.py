"""Products of many rows with weights of 4 or 8 bits on CUDA: unpacked first, then multiplied.

MLX multiplies packed weights there. For 512 rows of 5120 to 17408 that takes 655 us, of which 328
do here, for 1024 rows 1269 and 448; for 96 rows it is 204 against 263. Before its first product it
compiles for 30 s (H200, MLX 0.32.4).
"""

from typing import Any, Final

import mlx.core as mx

MAX_LAYER_BYTES: Final = 512 << 20
"""Unpacked, of one layer: an lm_head, which sees few rows anyway, stays packed."""
GROUP_BYTES: Final = 512 << 20
"""Unpacked weights that are handed to the GPU together; two groups are in memory at most."""


class Unpacking:
    """x (.., rows, K) times a layer's weights, (.., rows, N), for all layers of a model.

    MLX hands over up to ten graphs before it waits for one, so that 27B had 15 GB of unpacked
    weights at once. Here a group begins only when the one before the last has ended: the GPU still
    has one to compute while Python builds the next.
    """

    def __init__(self, group_bytes: int = GROUP_BYTES) -> None:
        self._group_bytes = group_bytes
        self._bytes = 0
        self._before: mx.array | None = None

    def __call__(self, x: mx.array, layer: Any) -> mx.array:
        weight = mx.dequantize(
            layer.weight,
            layer.scales,
            layer.biases,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
        y = x @ weight.T
        self._bytes += weight.nbytes
        if self._bytes >= self._group_bytes:
            mx.async_eval(y)
            if self._before is not None:
                mx.eval(self._before)
            self._before, self._bytes = y, 0
        return y


def fits(layer: Any) -> bool:
    """Whether a layer's weights are small enough to be unpacked."""
    return layer.weight.nbytes * layer.scales.itemsize * 8 // layer.bits <= MAX_LAYER_BYTES
