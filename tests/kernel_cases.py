"""Random inputs of kernels, and their results in plain operations."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import precise_swiglu
from mlx_lm.models.gated_delta import normalize_qk

from exo_node.shard.kernels.gated_delta import DeltaParameters, Sizes, reference
from exo_node.shard.kernels.product import Weights

Rows = tuple[mx.array, mx.array, mx.array, mx.array]


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """`inputs`: qkv, z, b and a of some rows."""

    sizes: Sizes
    inputs: Rows
    before: mx.array
    layer: DeltaParameters
    state: mx.array

    def row(self, i: int) -> Rows:
        qkv, z, b, a = self.inputs
        at = slice(i, i + 1)
        return qkv[:, at], z[:, at], b[:, at], a[:, at]

    def heads(self) -> tuple[mx.array, mx.array, mx.array]:
        """q, k and v after convolution and norm."""
        s, qkv = self.sizes, self.inputs[0]
        window = mx.concatenate([self.before, qkv], axis=1)
        out = nn.silu(mx.conv1d(window, self.layer.kernel, groups=qkv.shape[2]))
        keys = s.k_heads * s.size
        q, k, v = mx.split(out, [keys, 2 * keys], axis=-1)
        q, k, v = (x.reshape(*x.shape[:2], -1, s.size) for x in (q, k, v))
        q, k = normalize_qk(q, k, inv_scale=s.size**-0.5, eps=1e-6)
        return q, k, v

    def reference(self) -> tuple[mx.array, mx.array]:
        """The result of mlx-lm's layer: y after the gated norm, and the last state."""
        _, z, b, a = self.inputs
        y, last = reference(*self.heads(), a, b, self.layer, self.state)
        return precise_swiglu(y, z, mx.fast.rms_norm(y, self.layer.norm, 1e-6)), last


def delta_case(sizes: Sizes, *, batch: int, rows: int) -> DeltaCase:
    hk, hv, d = sizes.k_heads, sizes.v_heads, sizes.size
    channels = (2 * hk + hv) * d
    mx.random.seed(rows)

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(sizes.dtype)

    layer = DeltaParameters(
        normal(channels, 4, 1),
        mx.random.uniform(0, 2, (hv,)),
        normal(hv),
        mx.random.uniform(0.5, 1.5, (d,)).astype(sizes.dtype),
    )
    inputs = (
        normal(batch, rows, channels),
        normal(batch, rows, hv, d),
        normal(batch, rows, hv),
        normal(batch, rows, hv),
    )
    state = mx.random.normal((batch, hv, d, d))
    return DeltaCase(sizes, inputs, normal(batch, 3, channels), layer, state)


def product_case(weights: Weights, *, rows: int) -> tuple[nn.Module, mx.array, mx.array]:
    """A layer, x (1, rows, K) and their product in float32."""
    mx.random.seed(weights.features)
    shape = (weights.features, weights.inputs)
    layer: Any = nn.Linear(weights.inputs, weights.features, bias=False)
    layer.weight = (mx.random.normal(shape) * 0.05).astype(weights.dtype)
    stored = layer.weight.astype(mx.float32)
    if weights.bits:
        layer = nn.QuantizedLinear.from_linear(layer, weights.group, weights.bits)
        scales, biases = (x.astype(mx.float32) for x in (layer.scales, layer.biases))
        stored = mx.dequantize(layer.weight, scales, biases, weights.group, weights.bits)
    x = mx.random.normal((1, rows, weights.inputs)).astype(weights.dtype)
    with mx.stream(mx.cpu):  # a GPU would multiply float32 in TF32
        return layer, x, x.astype(mx.float32) @ stored.T
