"""Linear layers whose rows have the same bits however many rows a forward has.

Where MLX's product of one row differs from that of several, as on Metal, a single row is repeated
and more rows are computed in groups, so that each call has a number of rows that was measured to
agree. Nothing but the product sees a repeated row: no cache, mask, expert or attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from .product import stock
from .row_sets import WIDTHS, Product, RowRange, agreeing_rows
from .trial import KernelChoice, group_modules

NAME: Final = "row_groups"


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

    @property
    def size(self) -> tuple[int, int]:
        return self.inputs, self.outputs

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"product of {self.inputs} to {self.outputs}, {kind}{self.stored}"


def in_groups(product: Product, x: mx.array, agreeing: RowRange) -> mx.array:
    """The product of x (.., rows, inputs), in calls whose numbers of rows agree.

    Rows of a prompt, more than 64 of one request, are one call: no single step has their bits.
    """
    *before, inputs = x.shape
    if len(before) and before[-1] > WIDTHS[-1]:
        return product(x)
    flat = x.reshape(-1, inputs)
    rows = flat.shape[0]
    parts = [_product_of(product, flat[a:b], agreeing.floor) for a, b in _bounds(rows, agreeing)]
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return out.reshape(*before, out.shape[-1])


def _bounds(rows: int, agreeing: RowRange) -> list[tuple[int, int]]:
    """The first row and the end of each group: as few groups as possible, of about equal size."""
    count = -(-rows // agreeing.ceiling)
    ends = [rows * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def _product_of(product: Product, x: mx.array, floor: int) -> mx.array:
    """The product of a group, whose first row is repeated if the group has fewer than `floor`."""
    rows = x.shape[0]
    if rows >= floor:
        return product(x)
    return product(mx.concatenate([x, *[x[:1]] * (floor - rows)]))[:rows]


class GroupedLinear(nn.Linear):
    """A linear layer that computes in groups of rows, of `agreeing`, which `group_rows` sets."""

    agreeing: RowRange

    def __call__(self, x: mx.array) -> mx.array:
        return in_groups(super().__call__, x, self.agreeing)


class GroupedQuantizedLinear(nn.QuantizedLinear):
    """A quantised `GroupedLinear`."""

    agreeing: RowRange

    def __call__(self, x: mx.array) -> mx.array:
        return in_groups(super().__call__, x, self.agreeing)


class GroupedEmbedding(nn.Embedding):
    """A `GroupedLinear` for embeddings that serve as the lm_head."""

    agreeing: RowRange

    def as_linear(self, x: mx.array) -> mx.array:
        return in_groups(super().as_linear, x, self.agreeing)


class GroupedQuantizedEmbedding(nn.QuantizedEmbedding):
    """A quantised `GroupedEmbedding`."""

    agreeing: RowRange

    def as_linear(self, x: mx.array) -> mx.array:
        return in_groups(super().as_linear, x, self.agreeing)


_GROUPED: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: GroupedLinear,
    nn.QuantizedLinear: GroupedQuantizedLinear,
    nn.Embedding: GroupedEmbedding,
    nn.QuantizedEmbedding: GroupedQuantizedEmbedding,
}

_EMBEDDINGS: Final = (nn.Embedding, nn.QuantizedEmbedding)


def may_depend_on_rows() -> bool:
    """Whether MLX chooses the kernels of products by rows here, and our own do not replace them.

    On CPUs it does not, and there a measurement would take minutes.
    """
    return mx.metal.is_available() and mx.default_device() != mx.Device(mx.cpu)


def group_rows(modules: Sequence[nn.Module], dtype: mx.Dtype) -> tuple[KernelChoice, ...]:
    """Measures each kind of product in `modules` and groups its rows where one row and more differ.

    `dtype`: that of hidden states. Returns the kinds that are grouped, and those that no grouping
    makes exact.
    """
    if not may_depend_on_rows():
        return ()
    kinds = group_modules(modules, partial(_kind_of, dtype=dtype))
    # Embeddings are a product where they serve as the lm_head, in place of a layer of their size.
    linear = {kind.size for kind in kinds if not issubclass(kind.layer, _EMBEDDINGS)}
    products = {
        kind: layers
        for kind, layers in kinds.items()
        if not issubclass(kind.layer, _EMBEDDINGS) or kind.size not in linear
    }
    choices = (_group(kind, layers) for kind, layers in products.items())
    return tuple(choice for choice in choices if choice is not None)


def _group(kind: ProductKind, layers: Sequence[Any]) -> KernelChoice | None:
    agreeing = agreeing_rows(partial(stock, layers[0]), kind.inputs, kind.dtype)
    if agreeing is None:
        why = "no two numbers of rows give the same bits"
        return KernelChoice(NAME, str(kind), len(layers), False, why)
    if agreeing.is_all:
        return None
    for layer in layers:
        layer.agreeing = agreeing
        layer.__class__ = _GROUPED[kind.layer]
    return KernelChoice(NAME, str(kind), len(layers), True, f"{agreeing} give the same bits")


def _kind_of(layer: Any, dtype: mx.Dtype) -> ProductKind | None:
    if type(layer) not in _GROUPED:
        return None
    outputs, inputs = layer.weight.shape
    has_bias = "bias" in layer
    if not hasattr(layer, "bits"):
        return ProductKind(type(layer), inputs, outputs, layer.weight.dtype, has_bias)
    stored = f", {layer.mode} {layer.bits} bits in groups of {layer.group_size}"
    # Scales of mxfp4 and its like are integers.
    scales = layer.scales.dtype
    kind = scales if mx.issubdtype(scales, mx.floating) else dtype
    return ProductKind(type(layer), inputs * 32 // layer.bits, outputs, kind, has_bias, stored)
