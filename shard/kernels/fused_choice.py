"""Which parts of a model's layers compute a few rows in fewer launches."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import SwitchGLU

from ...mtp.rollback import TapedGatedDelta
from . import fused
from .product import QuantizedProduct, RowsQuantizedLinear, Together
from .trial import (
    FEW,
    Choice,
    Clock,
    Run,
    choice,
    pays,
    random_rows,
    try_kernel,
)


def fuse(modules: Sequence[nn.Module], clock: Clock) -> list[Choice]:
    """After the products, of which these are made."""
    return [
        *_mlps(modules, clock),
        *_experts(modules, clock),
        *_projections(modules, clock),
    ]


def grouped(
    modules: Sequence[nn.Module], key: Callable[[Any], Hashable | None]
) -> dict[Any, list[Any]]:
    """Those with a key, by their keys."""
    groups: dict[Any, list[Any]] = {}
    for module in modules:
        if (kind := key(module)) is not None:
            groups.setdefault(kind, []).append(module)
    return groups


def _mlps(modules: Sequence[nn.Module], clock: Clock) -> list[Choice]:
    def key(m: Any) -> Hashable | None:
        if type(m) is not Qwen3NextMLP or fused.unfit_mlp(m):
            return None
        gate, down = cast("Any", m.gate_proj), cast("Any", m.down_proj)
        return gate.product.storage, down.product.storage, gate.weight.shape

    return [_mlp(layers, clock) for layers in grouped(modules, key).values()]


def _mlp(layers: list[Any], clock: Clock) -> Choice:
    storage, width = layers[0].gate_proj.product.storage, layers[0].down_proj.weight.shape[0]
    x = random_rows((1, FEW, width), storage.dtype, 10)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return (fused.RowsMLP.__call__(layers[layer], x[:, :rows], x[:, :rows]),)

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return (x[:, :rows] + layers[layer](x[:, :rows]),)

    tried = try_kernel(ours, stock, len(layers), storage.dtype, clock)
    if used := pays([tried]):
        for layer in layers:
            layer.__class__ = fused.RowsMLP
    shape = f"MLP of {layers[0].gate_proj.weight.shape[0]}, {storage.bits} bits"
    return choice("gated_product", shape, tried, used=used)


def _experts(modules: Sequence[nn.Module], clock: Clock) -> list[Choice]:
    def key(m: Any) -> Hashable | None:
        if type(m) is not SwitchGLU:
            return None
        return fused.experts_of(m), m.gate_proj.weight.shape

    groups = grouped(modules, key)
    return [_experts_of(stored, layers, clock) for (stored, _), layers in groups.items()]


def _experts_of(stored: Any, layers: list[Any], clock: Clock) -> Choice:
    name, parts = "experts", layers[0].gate_proj.weight.shape
    shape = f"experts of {parts[1]}, {parts[0]} each"
    if isinstance(stored, str):
        return Choice(name, shape, len(layers), False, stored)
    kernels = tuple(QuantizedProduct(each) for each in stored)
    for layer in layers:
        layer.kernels, layer.rows_dtype = kernels, stored[0].dtype
    ours, stock = _expert_runs(layers, stored[0].dtype)
    tried = try_kernel(ours, stock, len(layers), stored[0].dtype, clock)
    if used := pays([tried]):
        for layer in layers:
            layer.__class__ = fused.RowsSwitchGLU
    return choice(name, shape, tried, used=used)


def _expert_runs(layers: list[Any], dtype: mx.Dtype) -> tuple[Run, Run]:
    """Eight random experts a row, as such models take them."""
    count, width = layers[0].gate_proj.weight.shape[0], layers[0].down_proj.weight.shape[1]
    x = random_rows((1, FEW, width), dtype, 11)
    scores = mx.random.uniform(shape=(1, FEW, count), key=mx.random.key(12))
    chosen = mx.argsort(scores, axis=-1)[..., : min(8, count)]
    mx.eval(chosen)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return (fused.RowsSwitchGLU.__call__(layers[layer], x[:, :rows], chosen[:, :rows]),)

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return (SwitchGLU.__call__(layers[layer], x[:, :rows], chosen[:, :rows]),)

    return ours, stock


def _projections(modules: Sequence[nn.Module], clock: Clock) -> list[Choice]:
    def key(m: Any) -> Hashable | None:
        if not isinstance(m, TapedGatedDelta) or not m.projections:
            return None
        parts = [getattr(m, name) for name in m.projections]
        if not all(type(part) is RowsQuantizedLinear for part in parts):
            return None
        return tuple((part.product.storage, part.weight.shape) for part in parts)

    return [_projected(layers, clock) for layers in grouped(modules, key).values()]


def _projected(layers: list[Any], clock: Clock) -> Choice:
    parts = [[getattr(layer, name) for name in layer.projections] for layer in layers]
    name, shape = "several_products", f"{len(parts[0])} projections of a gated delta layer"
    together = [Together(each) for each in parts]
    if together[0].kernel is None:
        return Choice(name, shape, len(layers), False, "they are stored differently")
    storage, width = parts[0][0].product.storage, layers[0].out_proj.weight.shape[0]
    x = random_rows((1, FEW, width), storage.dtype, 13)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return together[layer](x[:, :rows])

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return [part(x[:, :rows]) for part in parts[layer]]

    tried = try_kernel(ours, stock, len(layers), storage.dtype, clock)
    if used := pays([tried]):
        for layer, each in zip(layers, together, strict=True):
            layer.together = each
    return choice(name, shape, tried, used=used)
