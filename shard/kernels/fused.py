"""Parts of decoder layers in fewer launches for a few rows: on a GPU, launches bound a step.

Each rounds at the same places as the layer that it replaces; many rows use MLX's operations.
"""

from collections.abc import Hashable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU

from ...mtp.families.taped_gated_delta import TapedGatedDelta
from .product import (
    MAX_ROWS,
    JointProducts,
    QuantizedProduct,
    Storage,
    few,
    is_alone,
    quantised_weights,
    unfit,
)
from .trial import FEW, Clock, KernelChoice, Run, choice, group_modules, random_rows, try_kernel


class RowsMLP(Qwen3NextMLP):
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
    if not all(is_alone(part) for part in parts):
        return "its products have no kernel, or a bias"
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


def fuse(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    """Chooses for MLPs, experts and projections. Call it after the products, which they contain."""
    kinds = (
        (_mlp_kind, _choose_mlp),
        (_experts_kind, _choose_experts),
        (_projections_kind, _choose_projections),
    )
    return [
        choose(layers, clock)
        for kind, choose in kinds
        for layers in group_modules(modules, kind).values()
    ]


def _mlp_kind(m: Any) -> Hashable | None:
    if type(m) is not Qwen3NextMLP or unfit_mlp(m):
        return None
    gate, down = cast("Any", m.gate_proj), cast("Any", m.down_proj)
    return gate.product.storage, down.product.storage, gate.weight.shape


def _choose_mlp(layers: list[Any], clock: Clock) -> KernelChoice:
    storage, width = layers[0].gate_proj.product.storage, layers[0].down_proj.weight.shape[0]
    x = random_rows((1, FEW, width), storage.dtype, 10)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return (RowsMLP.__call__(layers[layer], x[:, :rows], x[:, :rows]),)

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return (x[:, :rows] + layers[layer](x[:, :rows]),)

    trial = try_kernel(ours, stock, len(layers), storage.dtype, clock)
    shape = f"MLP of {layers[0].gate_proj.weight.shape[0]}, {storage.bits} bits"
    chosen = choice("gated_product", shape, trial)
    for layer in layers if chosen.used else ():
        layer.__class__ = RowsMLP
    return chosen


def _experts_kind(m: Any) -> Hashable | None:
    return (experts_of(m), m.gate_proj.weight.shape) if type(m) is SwitchGLU else None


def _choose_experts(layers: list[Any], clock: Clock) -> KernelChoice:
    name, parts, storages = "experts", layers[0].gate_proj.weight.shape, experts_of(layers[0])
    shape = f"experts of {parts[1]}, {parts[0]} each"
    if isinstance(storages, str):
        return KernelChoice(name, shape, len(layers), False, storages)
    kernels = tuple(QuantizedProduct(each) for each in storages)
    for layer in layers:
        layer.kernels, layer.rows_dtype = kernels, storages[0].dtype
    ours, stock = _expert_runs(layers, storages[0].dtype)
    trial = try_kernel(ours, stock, len(layers), storages[0].dtype, clock)
    chosen = choice(name, shape, trial)
    for layer in layers if chosen.used else ():
        layer.__class__ = RowsSwitchGLU
    return chosen


def _expert_runs(layers: list[Any], dtype: mx.Dtype) -> tuple[Run, Run]:
    """Runs with eight random experts for each row, as these models choose them."""
    count, width = layers[0].gate_proj.weight.shape[0], layers[0].down_proj.weight.shape[1]
    x = random_rows((1, FEW, width), dtype, 11)
    scores = mx.random.uniform(shape=(1, FEW, count), key=mx.random.key(12))
    chosen = mx.argsort(scores, axis=-1)[..., : min(8, count)]
    mx.eval(chosen)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return (RowsSwitchGLU.__call__(layers[layer], x[:, :rows], chosen[:, :rows]),)

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return (SwitchGLU.__call__(layers[layer], x[:, :rows], chosen[:, :rows]),)

    return ours, stock


def _projections_kind(m: Any) -> Hashable | None:
    if not isinstance(m, TapedGatedDelta) or not m.projections:
        return None
    parts = [getattr(m, name) for name in m.projections]
    if not all(is_alone(part) for part in parts):
        return None
    return tuple((part.product.storage, part.weight.shape) for part in parts)


def _choose_projections(layers: list[Any], clock: Clock) -> KernelChoice:
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
    chosen = choice(name, shape, trial)
    if chosen.used:
        for layer, each in zip(layers, together, strict=True):
            layer.together = each
    return chosen
