"""Parts of decoder layers in fewer launches for a few rows: on a GPU, launches bound a step.

Each computes what the layer computes without it, rounded at the same places; many rows take MLX's.
"""

from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU

from .cuda import TYPES, CudaKernel
from .product import (
    MAX_ROWS,
    QuantizedProduct,
    RowsQuantizedLinear,
    Storage,
    few,
    stored,
    unfit,
)


class RowsMLP(qwen3_next.Qwen3NextMLP):
    """gate and up in one launch with their activation; down with what is added to it."""

    def __call__(self, x: mx.array, added: mx.array | None = None) -> mx.array:
        m = cast("Any", self)
        if not few(m.gate_proj, x):
            y = super().__call__(x)
            return y if added is None else added + y
        y = m.gate_proj.product.gated(x, m.gate_proj, m.up_proj)
        return m.down_proj.product(y, m.down_proj, added)


def unfit_mlp(layer: nn.Module) -> str:
    """Why `RowsMLP` cannot stand in; empty where it can."""
    m: Any = layer
    parts = (m.gate_proj, m.up_proj, m.down_proj)
    if not all(type(part) is RowsQuantizedLinear for part in parts):
        return "its products have no kernel"
    shapes = {(part.product.storage, part.weight.shape) for part in parts[:2]}
    return "gate and up are stored differently" if len(shapes) > 1 else ""


class RowsSwitchGLU(SwitchGLU):
    """The chosen experts' rows by `kernels` (of gate and up, and of down), a pair at a time."""

    kernels: tuple[QuantizedProduct, QuantizedProduct]
    rows_dtype: mx.Dtype

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if x.size > MAX_ROWS * x.shape[-1] or x.dtype != self.rows_dtype:
            return super().__call__(x, indices)
        m = cast("Any", self)
        y = self.kernels[0].experts_gated(x, m.gate_proj, m.up_proj, indices)
        return self.kernels[1].experts(y, m.down_proj, indices)


def experts_of(layer: nn.Module) -> tuple[Storage, Storage] | str:
    """How the experts of a `SwitchGLU` are stored, or why there is no kernel for them."""
    m: Any = layer
    parts = (m.gate_proj, m.up_proj, m.down_proj)
    if not all(type(part) is QuantizedSwitchLinear and part.mode == "affine" for part in parts):
        return "its experts are not quantised in MLX's affine mode"
    if any("bias" in part for part in parts) or type(m.activation) is not SwiGLU:
        return "its experts add a bias or have another activation"
    kinds = [stored(part) for part in parts]
    if why := next((why for kind in kinds if (why := unfit(kind))), ""):
        return why
    gate, up, down = (Storage(k.dtype, k.bits, k.group) for k in kinds)
    if gate != up or gate.dtype != down.dtype:
        return "gate and up are stored differently"
    return gate, down


class AddedNorm:
    """h = x + more, and h's RMS norm."""

    def __init__(self, dtype: mx.Dtype, eps: float) -> None:
        self._eps = mx.array([eps], dtype=mx.float32)
        mx.eval(self._eps)
        self._kernel = CudaKernel(
            f"added_norm_{TYPES[dtype]}",
            "exo::added_norm(x, more, weight, sum, y, eps[0], x_shape[2])",
            ("x", "more", "weight", "eps"),
            ("sum", "y"),
            file="norm.cuh",
        )

    def __call__(self, x: mx.array, more: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        h, y = self._kernel(
            [x, more, weight, self._eps],
            (x.shape[0] * x.shape[1], 1, 1),
            256,
            [(x.shape, x.dtype), (x.shape, x.dtype)],
        )
        return h, y


class _RowsLayer(nn.Module):
    """A decoder layer that adds and norms in one launch, and adds its MLP's rows in the product."""

    added_norm: AddedNorm

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        m, norm = cast("Any", self), cast("Any", self).post_attention_layernorm.weight
        if x.size > MAX_ROWS * x.shape[-1] or x.dtype != norm.dtype:
            return cast("Any", super()).__call__(x, mask, cache)
        mixer = m.linear_attn if m.is_linear else m.self_attn
        mixed = mixer(m.input_layernorm(x), mask, cache)
        h, normed = self.added_norm(x, mixed, norm)
        return m.mlp(normed, h) if isinstance(m.mlp, RowsMLP) else h + m.mlp(normed)


class RowsLayer35(_RowsLayer, qwen3_5.DecoderLayer):
    """Of Qwen3.5 and 3.6."""


class RowsLayerNext(_RowsLayer, qwen3_next.Qwen3NextDecoderLayer):
    """Of Qwen3-Next."""


LAYERS: dict[type[nn.Module], type[_RowsLayer]] = {
    qwen3_5.DecoderLayer: RowsLayer35,
    qwen3_next.Qwen3NextDecoderLayer: RowsLayerNext,
}
