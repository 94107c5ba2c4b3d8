"""Products of a few rows with a weight matrix on CUDA. Bits do not depend on the number of rows.

MLX chooses its product there by the number of rows, so a verify rounds differently from single
steps, and up to seven rows its product for 4-bit weights costs as much as single rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Protocol, cast

import mlx.core as mx
from mlx import nn

from .cuda import TYPES, CudaKernel
from .unpacked import Unpacking

MAX_ROWS = 64
"""The most rows of one forward, all sequences of a batch together."""
_WARPS = 8
_STAGES = 2
_HALF_THE_WARPS: Final = range(4096, 8192 + 1)
"""Sizes of rows that four warps share evenly. The bits of a product follow from its warps, so these
follow from the size of a row alone: neither rows of x nor what a launch computes changes them."""
_MANY_FEATURES: Final = 12_288
"""From here on blocks of twice the features still occupy a GPU."""


class Product(Protocol):
    """x (.., K) of up to MAX_ROWS rows times a layer's weights, (.., N)."""

    def __call__(self, x: mx.array, layer: Any) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """The shape and storage that a kernel is chosen for; `bits` is 0 if they are not quantised."""

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
    """The product with weights in the dtype of x."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._kernels = {tiles: _dense(dtype, tiles) for tiles in (1, 2)}
        self._features = 4 if dtype == mx.float32 else 16
        self._per_chunk = 16 if dtype == mx.float32 else 8
        self._threads = 128 if dtype == mx.float32 else 32 * _WARPS

    def __call__(self, x: mx.array, layer: Any) -> mx.array:
        weight, rows = layer.weight, x.size // x.shape[-1]
        features, tiles = weight.shape[0], 1 + (rows > 8)
        chunk = 16 if tiles == 2 else self._per_chunk
        y = self._kernels[tiles](
            [as_rows(x), weight],
            (-(-rows // chunk), -(-features // self._features), 1),
            self._threads,
            [((*x.shape[:-1], features), x.dtype)],
        )
        return y[0]


@dataclass(frozen=True, slots=True)
class Storage:
    """How quantised weights of one kind are stored, and so which kernels read them."""

    dtype: mx.Dtype
    bits: int
    group: int

    @property
    def step(self) -> int:
        """Numbers in 128 bytes of a row: what a warp takes at a time."""
        return 1024 // self.bits

    def cut(self, call: str, rows: int, features: int, inputs: int) -> "Cut":
        """How a product is cut: what was fastest for the 27B's sizes on an H200."""
        experts, gated = call.startswith("experts"), "gated" in call
        four = inputs in _HALF_THE_WARPS and not experts
        most = min(4 if four else _WARPS, inputs // self.step)
        warps = max(w for w in (1, 2, 4, 8) if w <= max(1, most))
        tiles = 1 if experts or rows <= (8 if four else 16) else 2 if rows <= 16 else 4
        many = tiles == 4 or (tiles == 1 and four and features >= _MANY_FEATURES)
        in_ring = four and rows <= (8 if gated else 4)
        return Cut(warps, tiles, 2 if many and not gated else 1, rows if in_ring else 0)

    def shared_bytes(self, cut: "Cut", matrices: int) -> int:
        """Bytes of a block's shared memory: the ring of each warp, later the sums of all."""
        small_units = self.bits == 8 or self.group == 32  # of 32 k: see `Walk`
        pitch = 144 if self.bits == 4 and small_units else 160
        row = pitch + 4 * max(2, self.step // self.group)
        x_row = 2 * self.step + (64 if small_units else 16)
        tall = 16 * cut.wide * matrices
        ring = cut.warps * _STAGES * (tall * row + cut.ring_rows * x_row)
        return max(ring, cut.warps * cut.tiles * 8 * tall * 4)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into blocks: see `Cut` in quantized.cuh."""

    warps: int
    tiles: int
    wide: int
    ring_rows: int
    """The rows of x that travel with the weights: all, or none."""


class QuantizedProduct:
    """The product with 4- or 8-bit weights in groups of 32, 64 or 128.

    A launch is short, so Python's work bounds it: no attribute is read twice.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._dtype = storage.dtype
        self._kernels: dict[tuple[str, int, int, int, int], tuple[CudaKernel, Cut, int]] = {}

    def _kernel(
        self, call: str, rows: int, features: int, inputs: int, outputs: int
    ) -> tuple[CudaKernel, Cut, int]:
        """The kernel, its cut and the bytes of its shared memory."""
        key = (call, rows, features, inputs, outputs)
        if (entry := self._kernels.get(key)) is None:
            cut, matrices = self.storage.cut(call, rows, features, inputs), 1 + ("gated" in call)
            most = replace(cut, ring_rows=8 * (cut.ring_rows > 0))
            kernel = _quantized(self.storage, call, most, outputs)
            entry = kernel, cut, self.storage.shared_bytes(cut, matrices)
            self._kernels[key] = entry
        return entry

    def _product(self, call: str, x: mx.array, arrays: list[mx.array], features: int) -> mx.array:
        *before, inputs = x.shape
        rows = math.prod(before)
        kernel, cut, shared = self._kernel(call, rows, features, inputs, 1)
        return kernel(
            [as_rows(x), *arrays],
            (-(-rows // (8 * cut.tiles)), -(-features // (16 * cut.wide)), 1),
            32 * cut.warps,
            [((*before, features), self._dtype)],
            shared,
        )[0]

    def __call__(self, x: mx.array, layer: Any, added: mx.array | None = None) -> mx.array:
        """The product; plus `added` if given, which has the shape of the result."""
        arrays = _arrays(layer)
        features = arrays[0].shape[0]
        if added is None:
            return self._product("product", x, arrays, features)
        return self._product("added", x, [*arrays, as_rows(added)], features)

    def gated(self, x: mx.array, gate: Any, up: Any) -> mx.array:
        """silu(x gate) * (x up), for two layers of one shape."""
        arrays = _arrays(gate)
        features = arrays[0].shape[0]
        return self._product("gated", x, [*arrays, *_arrays(up)], features)

    def several(self, x: mx.array, layers: Sequence[Any]) -> list[mx.array]:
        """The products with each of `layers`, in one launch."""
        *before, inputs = x.shape
        rows = math.prod(before)
        weights = [_arrays(layer) for layer in layers]
        features = [arrays[0].shape[0] for arrays in weights]
        kernel, cut, shared = self._kernel("several", rows, sum(features), inputs, len(layers))
        each = 16 * cut.wide
        return kernel(
            [as_rows(x), *(array for arrays in weights for array in arrays)],
            (-(-rows // (8 * cut.tiles)), sum(-(-wide // each) for wide in features), 1),
            32 * cut.warps,
            [((*before, wide), self._dtype) for wide in features],
            shared,
        )

    def experts(self, x: mx.array, layer: Any, chosen: mx.array) -> mx.array:
        """(.., e, N) of x (.., K) or (.., e, K) with the experts `chosen` (.., e)."""
        return self._experts("experts", x, _arrays(layer), chosen)

    def experts_gated(self, x: mx.array, gate: Any, up: Any, chosen: mx.array) -> mx.array:
        """silu(x gate) * (x up) with the experts `chosen`, shaped like `experts`."""
        return self._experts("experts_gated", x, [*_arrays(gate), *_arrays(up)], chosen)

    def _experts(
        self, call: str, x: mx.array, arrays: list[mx.array], chosen: mx.array
    ) -> mx.array:
        features, shape = arrays[0].shape[1], chosen.shape
        kernel, cut, shared = self._kernel(call, 1, features, x.shape[-1], 1)
        return kernel(
            [as_rows(x), *arrays, chosen.reshape(-1)],
            (math.prod(shape), -(-features // 16), 1),
            32 * cut.warps,
            [((*shape, features), self._dtype)],
            shared,
        )[0]


def as_rows(x: mx.array) -> mx.array:
    """x with three axes, which the kernels expect."""
    return x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])


def _arrays(layer: Any) -> list[mx.array]:
    return [layer["weight"], layer["scales"], layer["biases"]]


_ROWS = "x_shape[0] * x_shape[1]"


def _dense(dtype: mx.Dtype, tiles: int) -> CudaKernel:
    kind = TYPES[dtype]
    sizes = f"{_ROWS}, w_shape[0], w_shape[1]"
    call = f"exo::dense<{tiles}, {_WARPS}>(x, w, y, {sizes})"
    if dtype == mx.float32:
        call = f"exo::dense_float(x, w, y, {sizes})"
    return CudaKernel(f"dense_{kind}_{tiles}", call, ("x", "w"), ("y",), file="product.cuh")


_W, _GATE, _UP = (("w", "s", "b"), ("gw", "gs", "gb"), ("uw", "us", "ub"))
_CALLS: Final = {
    "product": "quantized<{cut}, false>(x, {{w, s, b}}, x, y, {sizes})",
    "added": "quantized<{cut}, true>(x, {{w, s, b}}, added, y, {sizes})",
    "gated": "quantized_gated<{cut}>(x, {{gw, gs, gb}}, {{uw, us, ub}}, y, {sizes})",
    "experts": "experts<{cut}>(x, {{w, s, b}}, chosen, y, {sizes})",
    "experts_gated": "experts_gated<{cut}>(x, {{gw, gs, gb}}, {{uw, us, ub}}, chosen, y, {sizes})",
    "several": "several<{cut}>(x, from, y, features, shared, {rows}, x_shape[2])",
}
_INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "product": _W,
    "added": (*_W, "added"),
    "gated": (*_GATE, *_UP),
    "experts": (*_W, "chosen"),
    "experts_gated": (*_GATE, *_UP, "chosen"),
}


@cache
def _quantized(storage: Storage, call: str, cut: Cut, outputs: int) -> CudaKernel:
    experts, matrices = call.startswith("experts"), 1 + ("gated" in call)
    weight = "gw" if matrices == 2 else "w"
    rows = f"chosen_shape[0] / ({_ROWS})" if experts else _ROWS
    sizes = [cut.tiles, cut.wide, cut.warps, _STAGES, int(cut.ring_rows > 0)]
    numbers = [storage.bits, storage.group, *sizes]
    text = _CALLS[call].format(
        cut=f"exo::Cut<{', '.join(map(str, numbers))}>",
        sizes=f"shared, {rows}, {weight}_shape[{int(experts)}], x_shape[2]",
        rows=_ROWS,
    )
    inputs, results, before = _INPUTS.get(call, ()), ("y",), ""
    if call == "several":
        before, inputs, results = _several_arrays(outputs, TYPES[storage.dtype])
    name = "_".join(map(str, (call, TYPES[storage.dtype], *numbers, outputs)))
    return CudaKernel(
        name,
        f"{before}exo::{text}",
        ("x", *inputs),
        results,
        file="quantized.cuh",
        shared_bytes=storage.shared_bytes(cut, matrices),
    )


def _several_arrays(count: int, kind: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The source that gathers `count` layers' arrays, and the names of inputs and outputs."""
    names = [(f"w{i}", f"s{i}", f"b{i}") for i in range(count)]
    stored = ", ".join("{" + ", ".join(each) + "}" for each in names)
    results = tuple(f"y{i}" for i in range(count))
    text = (
        f"const exo::Stored<{kind}> from[{count}] = {{{stored}}};\n"
        f"{kind}* const y[{count}] = {{{', '.join(results)}}};\n"
        f"const int features[{count}] = {{{', '.join(f'w{i}_shape[0]' for i in range(count))}}};\n"
    )
    return text, tuple(name for each in names for name in each), results


def unfit(weights: Weights) -> str:
    """The reason why there is no kernel for these weights; empty if there is one."""
    if weights.dtype not in TYPES or (weights.bits and weights.dtype == mx.float32):
        return f"it computes in {weights.dtype}"
    if weights.bits not in (0, 4, 8) or weights.group not in (0, 32, 64, 128):
        return f"its weights have {weights.bits} bits in groups of {weights.group}"
    step = 1024 // weights.bits if weights.bits else 4 if weights.dtype == mx.float32 else 32
    if weights.inputs % step:
        return f"its rows have {weights.inputs} numbers, no multiple of {step}"
    if (weights.bits, weights.group) == (8, 128) and weights.features % 2:
        return "it has an odd number of features"  # scales are fetched in pairs
    return ""


def weights_of(layer: nn.Module) -> Weights | None:
    """The weights of a layer, or None if it is not a product that a kernel may compute."""
    m: Any = layer
    if type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        return quantised_weights(layer) if m.mode == "affine" else None
    if type(layer) in (nn.Linear, nn.Embedding):
        return Weights(m.weight.shape[0], m.weight.shape[1], m.weight.dtype)
    return None


def quantised_weights(layer: Any) -> Weights:
    """The weights of a layer quantised in the affine mode, or of each of its experts."""
    features, inputs = layer.weight.shape[-2], layer.weight.shape[-1] * 32 // layer.bits
    return Weights(features, inputs, layer.scales.dtype, layer.bits, layer.group_size)


def product_for(weights: Weights) -> Product:
    """The kernel for weights that are not `unfit`."""
    if weights.bits:
        return QuantizedProduct(Storage(weights.dtype, weights.bits, weights.group))
    return DenseProduct(weights.dtype)


def stock(layer: nn.Module, x: mx.array) -> mx.array:
    """MLX's own product."""
    m: Any = layer
    return m.as_linear(x) if isinstance(m, nn.Embedding | nn.QuantizedEmbedding) else m(x)


class JointProducts:
    """The products of several layers with one x, in one launch if they are stored alike."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        kernel = getattr(layers[0], "product", None)
        alike = all(
            is_alone(each)
            and each.product.storage == cast("RowsQuantizedLinear", layers[0]).product.storage
            for each in layers
        )
        self.kernel = kernel if alike else None

    def __call__(self, x: mx.array) -> list[mx.array]:
        if self.kernel is not None and few(self._layers[0], x):
            return self.kernel.several(x, self._layers)
        return [layer(x) for layer in self._layers]


def sum_with(layer: Any, x: mx.array, more: mx.array) -> mx.array:
    """more + layer(x), in one launch if the layer has a kernel for it."""
    if is_alone(layer) and few(layer, x):
        return layer.product(x, layer, more)
    return more + layer(x)


def is_alone(layer: Any) -> bool:
    """Whether a layer is a kernel's product and nothing more, which launches of several compute."""
    return type(layer) is RowsQuantizedLinear and "bias" not in layer


def with_bias(layer: Any, y: mx.array) -> mx.array:
    """A layer's product with its bias, if it has one, added to each row."""
    return y + layer.bias if "bias" in layer else y


def few(layer: Any, x: mx.array) -> bool:
    """Whether the kernel of `layer` computes `x`."""
    return x.size <= MAX_ROWS * x.shape[-1] and x.dtype == layer.rows_dtype


class RowsLinear(nn.Linear):
    """A linear layer that computes up to MAX_ROWS rows by `product`, which `put_in` sets."""

    product: Product
    rows_dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        return with_bias(self, self.product(x, self)) if few(self, x) else super().__call__(x)


class RowsQuantizedLinear(nn.QuantizedLinear):
    """A quantised `RowsLinear`; more rows by `unpacking` if it is set."""

    product: QuantizedProduct
    rows_dtype: mx.Dtype
    unpacking: Unpacking | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if few(self, x):
            return with_bias(self, self.product(x, self))
        if self.unpacking is not None and x.dtype == self.rows_dtype:
            return with_bias(self, self.unpacking(x, self))
        return super().__call__(x)


class RowsEmbedding(nn.Embedding):
    """A `RowsLinear` for embeddings that serve as the lm_head."""

    product: Product
    rows_dtype: mx.Dtype

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(x, self) if few(self, x) else super().as_linear(x)


class RowsQuantizedEmbedding(nn.QuantizedEmbedding):
    """A quantised `RowsEmbedding`."""

    product: QuantizedProduct
    rows_dtype: mx.Dtype

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(x, self) if few(self, x) else super().as_linear(x)


_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowsLinear,
    nn.QuantizedLinear: RowsQuantizedLinear,
    nn.Embedding: RowsEmbedding,
    nn.QuantizedEmbedding: RowsQuantizedEmbedding,
}


def put_in(layer: nn.Module, product: Product, dtype: mx.Dtype) -> None:
    """Makes a layer compute up to MAX_ROWS rows by `product`; its weights do not change."""
    layer.__class__ = _STAND_INS[type(layer)]
    m: Any = layer
    m.product, m.rows_dtype = product, dtype
