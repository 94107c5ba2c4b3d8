"""Products of many rows with weights of 4 or 8 bits: unpacked first, then multiplied.

MLX multiplies packed weights. On CUDA 512 rows of 5120 to 17408 take it 655 us and this 328 us,
1024 rows 1269 and 448, 96 rows 204 and 263; it compiles for 30 s before its first product (H200,
MLX 0.32.4). On a CPU it loops over rows: 256 of 1024 to 3584 in float32 take 608 ms and, where
products are ours, 27 (one core of an EPYC).
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from ...mtp.caches.window import MAX_ROLLBACK_ROWS

MAX_LAYER_BYTES: Final = 512 << 20
"""The largest unpacked layer. An lm_head, which computes few rows anyway, stays packed."""
GROUP_BYTES: Final = 512 << 20
"""Unpacked weights that are sent to the GPU together; at most two groups are in memory."""


class Unpacking:
    """x (.., rows, K) times a layer's weights, (.., rows, N), for all layers of a model.

    MLX issues up to ten graphs before it waits for one, so a 27B model had 15 GB of unpacked
    weights at once. Here a group starts only when the one before the last has ended: the GPU
    computes one while Python builds the next.
    """

    def __init__(self, group_bytes: int = GROUP_BYTES) -> None:
        self._group_bytes = group_bytes
        self._bytes = 0
        self._before: mx.array | None = None

    def __call__(self, x: mx.array, layer: Any) -> mx.array:
        weight = unpacked(layer)
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


def unpacked(layer: Any) -> mx.array:
    """The weights of a quantised layer, (N, K), in the dtype of its scales."""
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


class UnpackedLinear(nn.QuantizedLinear):
    """A quantised layer on a CPU that unpacks its weights for a prompt.

    A prompt's forward has more rows of a sequence than can be rolled back. Fewer are MLX's product
    of packed weights, which computes each row by itself, as ours does with unpacked ones: bits
    depend on neither neighbours nor drafts.
    """

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[-2] <= MAX_ROLLBACK_ROWS:
            return super().__call__(x)
        y = x @ unpacked(self).T
        return y + self.bias if "bias" in self else y


def unpack_prompts(modules: Sequence[nn.Module]) -> int:
    """Makes quantised layers on a CPU unpack their weights for prompts. Returns their number.

    Only float32 is faster, and only where products of its matrices are ours.
    """
    layers = {
        id(layer): layer
        for module in modules
        for _, layer in module.named_modules()
        if type(layer) is nn.QuantizedLinear
        and (layer.mode, layer.scales.dtype) == ("affine", mx.float32)
        and fits(layer)
    }
    for layer in layers.values():
        layer.__class__ = UnpackedLinear
    return len(layers)
