"""Products of a few rows with a weight matrix on CUDA, whose bits do not depend on how many rows.

MLX chooses its product there by the number of rows, so a verify rounds otherwise than single steps,
and its product for 4-bit weights costs as many single rows as there are, up to seven.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from .cuda import TYPES, CudaKernel

MAX_ROWS = 16
_WARPS = 8
_RING = (1, 8, 2)
"""Tiles of 16 features, warps and stages of a block of the quantised product."""


class Product(Protocol):
    """x (.., K) of up to MAX_ROWS rows times a layer's weights, (.., N)."""

    def __call__(self, x: mx.array, layer: Any) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """What a kernel is chosen for. `bits` 0: not quantised."""

    features: int
    inputs: int
    dtype: mx.Dtype
    bits: int = 0
    group: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        stored = f", {self.bits} bits in groups of {self.group}" if self.bits else ""
        return f"{self.inputs} to {self.features}, {kind}{stored}"


class DenseProduct:
    """Of weights in the dtype of x."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._kernels = {tiles: _dense(dtype, tiles) for tiles in (1, 2)}
        self._per_block = 4 if dtype == mx.float32 else 16
        self._threads = 128 if dtype == mx.float32 else 32 * _WARPS

    def __call__(self, x: mx.array, layer: Any) -> mx.array:
        weight, rows = layer.weight, x.size // x.shape[-1]
        features = weight.shape[0]
        y = self._kernels[1 + (rows > 8)](
            [x.reshape(rows, -1), weight],
            (-(-features // self._per_block), 1, 1),
            self._threads,
            [((*x.shape[:-1], features), x.dtype)],
        )
        return y[0]


class QuantizedProduct:
    """Of 4-bit weights in groups of 64 or 128."""

    def __init__(self, dtype: mx.Dtype, group: int) -> None:
        self._kernels = {tiles: _quantized(dtype, group, tiles) for tiles in (1, 2)}

    def __call__(self, x: mx.array, layer: Any) -> mx.array:
        weight, rows = layer.weight, x.size // x.shape[-1]
        features = weight.shape[0]
        y = self._kernels[1 + (rows > 8)](
            [x.reshape(rows, -1), weight, layer.scales, layer.biases],
            (features // (16 * _RING[0]), 1, 1),
            32 * _RING[1],
            [((*x.shape[:-1], features), x.dtype)],
        )
        return y[0]


def _dense(dtype: mx.Dtype, tiles: int) -> CudaKernel:
    kind = TYPES[dtype]
    sizes = "x_shape[0], w_shape[0], w_shape[1]"
    call = f"exo::dense<{tiles}, {_WARPS}>(x, w, y, {sizes})"
    if dtype == mx.float32:
        call = f"exo::dense_float(x, w, y, {sizes})"
    return CudaKernel(f"dense_{kind}_{tiles}", call, ("x", "w"), ("y",), file="product.cuh")


def _quantized(dtype: mx.Dtype, group: int, tiles: int) -> CudaKernel:
    tall, warps, stages = _RING
    rows = 16 * tall
    ring, sums = warps * stages * rows * (160 + 1024 // group), warps * tiles * 8 * rows * 4
    return CudaKernel(
        f"quantized_{TYPES[dtype]}_{group}_{tiles}",
        f"exo::quantized<{tall}, {warps}, {stages}, {group}, {tiles}>(x, w, scales, biases, y, "
        "shared, x_shape[0], w_shape[0], x_shape[1])",
        ("x", "w", "scales", "biases"),
        ("y",),
        file="product.cuh",
        shared_bytes=max(ring, sums),
    )


def unfit(weights: Weights) -> str:
    """Why there is no kernel for such weights; empty where there is one."""
    if weights.dtype not in TYPES or (weights.bits and weights.dtype == mx.float32):
        return f"it computes in {weights.dtype}"
    if weights.bits not in (0, 4) or weights.group not in (0, 64, 128):
        return f"its weights have {weights.bits} bits in groups of {weights.group}"
    step = 256 if weights.bits else 4 if weights.dtype == mx.float32 else 32
    if weights.inputs % step or (weights.bits and weights.features % 16):
        return f"its sizes are no multiples of {step} and 16"
    return ""


def weights_of(layer: nn.Module) -> Weights | None:
    """None for what is no product, or adds a bias."""
    m: Any = layer
    if type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        if m.mode != "affine" or m.get("bias") is not None:
            return None
        features, inputs = m.weight.shape[0], m.weight.shape[1] * 32 // m.bits
        return Weights(features, inputs, m.scales.dtype, m.bits, m.group_size)
    if type(layer) in (nn.Linear, nn.Embedding) and m.get("bias") is None:
        return Weights(m.weight.shape[0], m.weight.shape[1], m.weight.dtype)
    return None


def product_for(weights: Weights) -> Product:
    """Only where it is not `unfit`."""
    if weights.bits:
        return QuantizedProduct(weights.dtype, weights.group)
    return DenseProduct(weights.dtype)


def stock(layer: nn.Module, x: mx.array) -> mx.array:
    """MLX's own product."""
    m: Any = layer
    return m.as_linear(x) if isinstance(m, nn.Embedding | nn.QuantizedEmbedding) else m(x)


def _few(layer: Any, x: mx.array) -> bool:
    return x.size <= MAX_ROWS * x.shape[-1] and x.dtype == layer.rows_dtype


class RowsLinear(nn.Linear):
    """Up to MAX_ROWS rows by `product`, which `install` sets."""

    product: Product
    rows_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        return self.product(x, self) if _few(self, x) else super().__call__(x)


class RowsQuantizedLinear(nn.QuantizedLinear):
    """As `RowsLinear`."""

    product: Product
    rows_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        return self.product(x, self) if _few(self, x) else super().__call__(x)


class RowsEmbedding(nn.Embedding):
    """As `RowsLinear`, where embeddings serve as the lm_head."""

    product: Product
    rows_dtype: mx.Dtype

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(x, self) if _few(self, x) else super().as_linear(x)


class RowsQuantizedEmbedding(nn.QuantizedEmbedding):
    """As `RowsEmbedding`."""

    product: Product
    rows_dtype: mx.Dtype

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(x, self) if _few(self, x) else super().as_linear(x)


_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowsLinear,
    nn.QuantizedLinear: RowsQuantizedLinear,
    nn.Embedding: RowsEmbedding,
    nn.QuantizedEmbedding: RowsQuantizedEmbedding,
}


def put_in(layer: nn.Module, product: Product, dtype: mx.Dtype) -> None:
    """Makes a layer compute few rows by `product`; its weights stay as they are."""
    layer.__class__ = _STAND_INS[type(layer)]
    m: Any = layer
    m.product, m.rows_dtype = product, dtype
