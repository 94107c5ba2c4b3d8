"""Chooses the parts of layers that compute a few rows in fewer launches."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import SwitchGLU

from ...mtp.families.taped_gated_delta import TapedGatedDelta
from . import fused
from .product import JointProducts, QuantizedProduct, RowsQuantizedLinear
from .trial import (
    FEW,
    Clock,
    KernelChoice,
    Run,
    choice,
    pays,
    random_rows,
    try_kernel,
)


def fuse(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    """Chooses for MLPs, experts and projections. Call it after the products, which they contain."""
    return [
        *_choose_mlps(modules, clock),
        *_choose_experts(modules, clock),
        *_choose_projections(modules, clock),
    ]


def group_modules(
    modules: Sequence[nn.Module], key: Callable[[Any], Hashable | None]
) -> dict[Any, list[Any]]:
    """Groups the modules by their key; those whose key is None are left out."""
    groups: dict[Any, list[Any]] = {}
    for module in modules:
        if (kind := key(module)) is not None:
            groups.setdefault(kind, []).append(module)
    return groups


def _choose_mlps(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    def key(m: Any) -> Hashable | None:
        if type(m) is not Qwen3NextMLP or fused.unfit_mlp(m):
            return None
        gate, down = cast("Any", m.gate_proj), cast("Any", m.down_proj)
        return gate.product.storage, down.product.storage, gate.weight.shape

    return [_choose_mlp(layers, clock) for layers in group_modules(modules, key).values()]


def _choose_mlp(layers: list[Any], clock: Clock) -> KernelChoice:
    storage, width = layers[0].gate_proj.product.storage, layers[0].down_proj.weight.shape[0]
    x = random_rows((1, FEW, width), storage.dtype, 10)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return (fused.RowsMLP.__call__(layers[layer], x[:, :rows], x[:, :rows]),)

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return (x[:, :rows] + layers[layer](x[:, :rows]),)

    trial = try_kernel(ours, stock, len(layers), storage.dtype, clock)
    if used := pays([trial]):
        for layer in layers:
            layer.__class__ = fused.RowsMLP
    shape = f"MLP of {layers[0].gate_proj.weight.shape[0]}, {storage.bits} bits"
    return choice("gated_product", shape, trial, used=used)


def _choose_experts(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    def key(m: Any) -> Hashable | None:
        if type(m) is not SwitchGLU:
            return None
        return fused.experts_of(m), m.gate_proj.weight.shape

    groups = group_modules(modules, key)
    return [
        _choose_expert_kind(storages, layers, clock) for (storages, _), layers in groups.items()
    ]


def _choose_expert_kind(storages: Any, layers: list[Any], clock: Clock) -> KernelChoice:
    name, parts = "experts", layers[0].gate_proj.weight.shape
    shape = f"experts of {parts[1]}, {parts[0]} each"
    if isinstance(storages, str):
        return KernelChoice(name, shape, len(layers), False, storages)
    kernels = tuple(QuantizedProduct(each) for each in storages)
    for layer in layers:
        layer.kernels, layer.rows_dtype = kernels, storages[0].dtype
    ours, stock = _expert_runs(layers, storages[0].dtype)
    trial = try_kernel(ours, stock, len(layers), storages[0].dtype, clock)
    if used := pays([trial]):
        for layer in layers:
            layer.__class__ = fused.RowsSwitchGLU
    return choice(name, shape, trial, used=used)


def _expert_runs(layers: list[Any], dtype: mx.Dtype) -> tuple[Run, Run]:
    """Runs with eight random experts for each row, as these models choose them."""
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


def _choose_projections(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    def key(m: Any) -> Hashable | None:
        if not isinstance(m, TapedGatedDelta) or not m.projections:
            return None
        parts = [getattr(m, name) for name in m.projections]
        if not all(type(part) is RowsQuantizedLinear for part in parts):
            return None
        return tuple((part.product.storage, part.weight.shape) for part in parts)

    return [
        _choose_projection_kind(layers, clock) for layers in group_modules(modules, key).values()
    ]


def _choose_projection_kind(layers: list[Any], clock: Clock) -> KernelChoice:
    parts = [[getattr(layer, name) for name in layer.projections] for layer in layers]
    name, shape = "several_products", f"{len(parts[0])} projections of a gated delta layer"
    together = [JointProducts(each) for each in parts]
    if together[0].kernel is None:
        return KernelChoice(name, shape, len(layers), False, "they are stored differently")
    storage, width = parts[0][0].product.storage, layers[0].out_proj.weight.shape[0]
    x = random_rows((1, FEW, width), storage.dtype, 13)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return together[layer](x[:, :rows])

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return [part(x[:, :rows]) for part in parts[layer]]

    trial = try_kernel(ours, stock, len(layers), storage.dtype, clock)
    if used := pays([trial]):
        for layer, each in zip(layers, together, strict=True):
            layer.together = each
    return choice(name, shape, trial, used=used)
