"""The products of a model whose rows may depend on each other, and how each is computed by itself.

Linear layers, embeddings as lm_head, experts, and what mlx-lm's classes multiply without a layer:
routers and the projections of latent attention.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)

from .cuda import available
from .product import stock
from .row_sets import WIDTHS

LINEAR: Final = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS: Final = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS: Final = (SwitchGLU, SwitchMLP)
PER_HEAD: Final = (MultiLinear, QuantizedMultiLinear)
"""x (B, heads, rows, inputs), and weights for each head."""
ROUTERS: Final = frozenset(("MoEGate", "Dots1TopkRouter"))
"""Names of classes whose forward is `x @ weight.T` and a choice for each row by itself."""
_OTHERS: Final = (nn.Conv1d, SwitchLinear, QuantizedSwitchLinear)
"""Layers with weights that are no product of rows, or part of a product above."""
MOST_COMPARED: Final = 16 * WIDTHS[-1]
"""The most choices of experts that are compared: those of 64 rows, 16 of each."""


@dataclass(frozen=True, slots=True)
class ProductKind:
    """Everything of a layer that may decide the kernels of its product."""

    layer: type[nn.Module]
    inputs: int
    outputs: int
    dtype: mx.Dtype
    has_bias: bool
    stored: str = ""
    """How its weights are quantised; empty if they are not."""
    several: int = 0
    """The number of experts or heads, or 0 for one matrix."""

    @property
    def size(self) -> tuple[int, int]:
        return self.inputs, self.outputs

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows to compare; for experts, rows times the experts of each.

        mlx-lm sorts from 64 on, and MLX has another kernel from 4 for each expert on. On CUDA
        cuBLAS has rules of its own for each number.
        """
        if not issubclass(self.layer, EXPERTS):
            return tuple(range(1, WIDTHS[-1] + 1)) if available() else WIDTHS
        border = 4 * self.several
        more = {each for each in (63, border - 1, border) if each < MOST_COMPARED}
        return tuple(sorted({*WIDTHS, *more, MOST_COMPARED}))

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        several = f", {self.several} {self._name}" if self.several else ""
        return f"product of {self.inputs} to {self.outputs}{several}, {kind}{self.stored}"

    @property
    def _name(self) -> str:
        return "experts" if issubclass(self.layer, EXPERTS) else "heads"

    @property
    def key(self) -> str:
        """Tells it from all others in a file."""
        return f"{self.layer.__name__}, {self}{', with bias' if self.has_bias else ''}"


def kind_of(layer: Any, dtype: mx.Dtype) -> ProductKind | None:
    """The kind of product that a module is, or None. `dtype`: that of hidden states."""
    kind = type(layer)
    if kind in EXPERTS:
        parts = [p for p in layer.children().values() if isinstance(p, _OTHERS)]
        first, *others = [_matrix(part, dtype) for part in parts]
        stored = " and".join(dict.fromkeys((first.stored, *(each.stored for each in others))))
        return ProductKind(kind, *first.size, first.dtype, first.has_bias, stored, first.several)
    if kind in LINEAR + EMBEDDINGS + PER_HEAD or is_router(layer):
        return _matrix(layer, dtype)
    return None


def _matrix(layer: Any, dtype: mx.Dtype) -> ProductKind:
    *before, outputs, inputs = layer.weight.shape
    several, has_bias = (before[0] if before else 0), "bias" in layer
    if not hasattr(layer, "bits"):
        kind = layer.weight.dtype
        return ProductKind(type(layer), inputs, outputs, kind, has_bias, "", several)
    stored = f", {layer.mode} {layer.bits} bits in groups of {layer.group_size}"
    # Scales of mxfp4 and its like are integers.
    scales = layer.scales.dtype
    kind = scales if mx.issubdtype(scales, mx.floating) else dtype
    inputs = inputs * 32 // layer.bits
    return ProductKind(type(layer), inputs, outputs, kind, has_bias, stored, several)


def name_of(module: Any, dtype: mx.Dtype) -> str:
    """The kind of product that a module is, or its class."""
    return str(kind_of(module, dtype) or type(module).__name__)


def is_router(layer: Any) -> bool:
    """Whether a module is one of ROUTERS with weights of its own."""
    return type(layer).__name__ in ROUTERS and "weight" in layer


def not_grouped(modules: Iterable[Any]) -> set[str]:
    """The classes of `modules` that have weights of two axes and more, and are no known product."""
    return {
        type(each).__name__
        for each in modules
        if getattr(each.get("weight"), "ndim", 0) >= 2
        and not isinstance(each, (*LINEAR, *EMBEDDINGS, *PER_HEAD, *_OTHERS))
        and not is_router(each)
    }


def plain_product(layer: Any, x: mx.array) -> mx.array:
    """The product of a layer with x (rows, inputs) as MLX computes it, (rows, outputs).

    Experts: one for each row, which its own numbers choose. Heads: all of them, with one x.
    """
    if isinstance(layer, EXPERTS):
        experts = next(p for p in layer.children().values() if isinstance(p, _OTHERS))
        chosen = mx.argmax(x[:, : experts.weight.shape[0]], axis=-1, keepdims=True)
        return layer(x, chosen).squeeze(-2)
    if isinstance(layer, PER_HEAD):
        heads = layer["weight"].shape[0]
        x = mx.contiguous(mx.broadcast_to(x, (1, heads, *x.shape)))
        return by_rows(layer(x))[0]
    return x @ layer.weight.T if is_router(layer) else stock(layer, x)


def by_rows(x: mx.array) -> mx.array:
    """(B, heads, rows, n) -> (B, rows, heads * n)."""
    batch, _, rows, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, rows, -1)


def by_heads(x: mx.array, heads: int) -> mx.array:
    """(B, rows, heads * n) -> (B, heads, rows, n)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
