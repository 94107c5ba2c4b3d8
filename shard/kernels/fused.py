"""Parts of decoder layers in fewer launches for a few rows: on a GPU, launches bound a step.

Each rounds at the same places as the layer that it replaces; many rows use MLX's operations.
"""

from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_next
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU

from .product import (
    MAX_ROWS,
    QuantizedProduct,
    RowsQuantizedLinear,
    Storage,
    few,
    quantised_weights,
    unfit,
)


class RowsMLP(qwen3_next.Qwen3NextMLP):
    """An MLP in two launches: gate and up with their activation, then down plus `added`."""

    def __call__(self, x: mx.array, added: mx.array | None = None) -> mx.array:
        m = cast("Any", self)
        if not few(m.gate_proj, x):
            y = super().__call__(x)
            return y if added is None else added + y
        y = m.gate_proj.product.gated(x, m.gate_proj, m.up_proj)
        return m.down_proj.product(y, m.down_proj, added)


def unfit_mlp(layer: nn.Module) -> str:
    """The reason why `RowsMLP` cannot replace the layer; empty if it can."""
    m: Any = layer
    parts = (m.gate_proj, m.up_proj, m.down_proj)
    if not all(type(part) is RowsQuantizedLinear for part in parts):
        return "its products have no kernel"
    shapes = {(part.product.storage, part.weight.shape) for part in parts[:2]}
    return "gate and up are stored differently" if len(shapes) > 1 else ""


class RowsSwitchGLU(SwitchGLU):
    """Experts in two launches by `kernels`: one for gate and up, one for down."""

    kernels: tuple[QuantizedProduct, QuantizedProduct]
    rows_dtype: mx.Dtype

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if x.size > MAX_ROWS * x.shape[-1] or x.dtype != self.rows_dtype:
            return super().__call__(x, indices)
        m = cast("Any", self)
        y = self.kernels[0].experts_gated(x, m.gate_proj, m.up_proj, indices)
        return self.kernels[1].experts(y, m.down_proj, indices)


def experts_of(layer: nn.Module) -> tuple[Storage, Storage] | str:
    """The storage of a `SwitchGLU`'s experts (gate and up, down), or why they have no kernel."""
    m: Any = layer
    parts = (m.gate_proj, m.up_proj, m.down_proj)
    if not all(type(part) is QuantizedSwitchLinear and part.mode == "affine" for part in parts):
        return "its experts are not quantised in MLX's affine mode"
    if any("bias" in part for part in parts) or type(m.activation) is not SwiGLU:
        return "its experts add a bias or have another activation"
    kinds = [quantised_weights(part) for part in parts]
    if why := next((why for kind in kinds if (why := unfit(kind))), ""):
        return why
    gate, up, down = (Storage(k.dtype, k.bits, k.group) for k in kinds)
    if gate != up or gate.dtype != down.dtype:
        return "gate and up are stored differently"
    return gate, down
