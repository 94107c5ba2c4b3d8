"""Installs CUDA kernels in a loaded model, layer by layer, where they are correct and pay."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.gated_delta import normalize_qk

from ...mtp.families.taped_gated_delta import MAX_STATE_ROWS, TapedGatedDelta, row_ends
from . import gated_delta, product, unpacked
from .attention_choice import choose_attention
from .cuda import available
from .fused import fuse
from .layers import trace_layers
from .trial import (
    EXACT_SLACK,
    FEW,
    Clock,
    KernelChoice,
    Run,
    Trial,
    choice,
    group_modules,
    pays,
    random_rows,
    try_kernel,
)

Mode = Literal["auto", "mlx"]
Note = Callable[[str], None]
Kind = tuple[mx.Dtype, int, int]
"""How weights are stored: dtype, bits and group size."""

COMPILING: Final = "compiling and trying kernels"
_MANY: Final = MAX_STATE_ROWS + 1
"""Rows of gated delta that are compared with fewer ones."""
_COMPARED: Final = (2, FEW, 8, 16)
"""Rows of which MLX's product is compared with that of one."""


def choose_kernels(
    models: Sequence[nn.Module], mode: Mode, clock: Clock, note: Note
) -> tuple[KernelChoice, ...]:
    """Chooses kernels for every layer of `models`; none if MLX does not run on CUDA.

    `note` gets a line before work that may take a minute the first time.
    """
    if not available():
        return ()
    modules = [module for model in models for _, module in model.named_modules()]
    if mode == "mlx":
        return (KernelChoice("none", "layers", len(modules), False, "EXO_KERNELS is mlx"),)
    note(COMPILING)
    choices = [*_choose_recurrences(modules, clock), *_choose_products(modules, clock)]
    # The later choices contain the layers of the earlier ones.
    choices += [*fuse(modules, clock), *choose_attention(modules, clock)]
    return (*choices, *trace_layers(modules, clock))


def _choose_recurrences(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    def kind(m: Any) -> tuple[gated_delta.Sizes, int, int] | None:
        if not isinstance(m, TapedGatedDelta) or not m.takes_kernel:
            return None
        sizes = m.num_k_heads, m.num_v_heads, m.head_k_dim, m.conv1d.weight.dtype
        eps: float = cast("Any", m).norm.eps
        return gated_delta.Sizes(*sizes, eps), m.head_v_dim, m.conv_kernel_size

    groups = group_modules(modules, kind)
    return [_choose_recurrence(*key, layers, clock) for key, layers in groups.items()]


def _choose_recurrence(
    sizes: gated_delta.Sizes, value_size: int, width: int, layers: list[Any], clock: Clock
) -> KernelChoice:
    name, shape = "gated_delta", f"gated delta of {sizes}"
    mixed = {x.dtype for m in layers for x in (m.dt_bias, m.norm.weight)} - {sizes.dtype}
    if why := gated_delta.unfit(sizes, value_size, width) or ("mixed dtypes" if mixed else ""):
        return KernelChoice(name, shape, len(layers), False, why)
    kernel = gated_delta.GatedDelta(sizes)
    parameters = [_parameters_of(m) for m in layers]
    ours, stock = _recurrence_runs(kernel, sizes, layers, parameters)
    trial = try_kernel(ours, stock, len(layers), sizes.dtype, clock)
    if not trial.fault and not _many_agree(kernel, sizes, parameters[0]):
        trial = Trial(len(layers), f"its {_MANY} rows are not those of fewer")
    chosen = choice(name, shape, trial)
    if chosen.used:
        for module, each in zip(layers, parameters, strict=True):
            module.kernel, module.fixed = kernel, each
    return chosen


def _parameters_of(module: Any) -> gated_delta.DeltaParameters:
    a_log, kernel = module.A_log.astype(mx.float32), mx.contiguous(module.conv1d.weight)
    mx.eval(a_log, kernel)
    return gated_delta.DeltaParameters(kernel, a_log, module.dt_bias, module.norm.weight)


def _recurrence_runs(
    kernel: gated_delta.GatedDelta,
    sizes: gated_delta.Sizes,
    layers: Sequence[Any],
    parameters: Sequence[gated_delta.DeltaParameters],
) -> tuple[Run, Run]:
    """Runs of the kernel and of mlx-lm's operations on the same random rows."""
    hk, hv, d = sizes.k_heads, sizes.v_heads, sizes.size
    qkv, z, b, a, before, state = _random_inputs(sizes, FEW)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        q, w, u, v = (x[:, :rows] for x in (qkv, z, b, a))
        y, _, states = kernel.rows(q, w, u, v, before, parameters[layer], state)
        return y, states[rows - 1]

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        module = layers[layer]
        window = mx.concatenate([before, qkv[:, :rows]], axis=1)
        out = nn.silu(module.conv1d(window))
        q, k, v = mx.split(out, [hk * d, 2 * hk * d], axis=-1)
        q, k = (x.reshape(1, rows, hk, d) for x in (q, k))
        q, k = normalize_qk(q, k, inv_scale=d**-0.5, eps=1e-6)
        y, last = gated_delta.reference(
            q, k, v.reshape(1, rows, hv, d), a[:, :rows], b[:, :rows], parameters[layer], state
        )
        return module.norm(y, z[:, :rows]), last

    return ours, stock


def _many_agree(
    kernel: gated_delta.GatedDelta, sizes: gated_delta.Sizes, layer: gated_delta.DeltaParameters
) -> bool:
    """Whether _MANY rows in one launch are bit for bit those in two. It also compiles them."""
    qkv, z, b, a, before, state = _random_inputs(sizes, _MANY)
    ends, ys = row_ends(_MANY, 1), list[mx.array]()
    y, _, last = kernel.rows(qkv, z, b, a, before, layer, state, ends=ends)
    for rows in (slice(MAX_STATE_ROWS), slice(MAX_STATE_ROWS, _MANY)):
        q, w, u, v = (x[:, rows] for x in (qkv, z, b, a))
        few, window, states = kernel.rows(q, w, u, v, before, layer, state)
        before, state = window[:, -3:], states[-1]
        ys.append(few)
    same = mx.array_equal(y, mx.concatenate(ys, axis=1)) & mx.array_equal(last, state)
    return cast("bool", same.item())


def _random_inputs(sizes: gated_delta.Sizes, rows: int) -> list[mx.array]:
    """qkv, z, b, a, the convolution's rows before them, and the state."""
    hk, hv, d = sizes.k_heads, sizes.v_heads, sizes.size
    channels = (2 * hk + hv) * d
    shapes = ((1, rows, channels), (1, rows, hv, d), (1, rows, hv), (1, rows, hv), (1, 3, channels))
    arrays = [random_rows(shape, sizes.dtype, i) for i, shape in enumerate(shapes)]
    return [*arrays, random_rows((1, hv, d, d), mx.float32, 5)]


def _choose_products(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    kinds: dict[Kind, dict[product.Weights, list[nn.Module]]] = {}
    for module in modules:
        if (weights := product.weights_of(module)) is not None:
            shapes = kinds.setdefault((weights.dtype, weights.bits, weights.group), {})
            shapes.setdefault(weights, []).append(module)
    return [choice for shapes in kinds.values() for choice in _choose_product(shapes, clock)]


def _choose_product(
    shapes: dict[product.Weights, list[nn.Module]], clock: Clock
) -> list[KernelChoice]:
    """Chooses for all weights that are stored alike: one kernel for all their shapes or none."""
    kernel: product.Product | None = None
    trials: list[Trial] = []
    for weights, layers in shapes.items():
        if why := product.unfit(weights):
            trials.append(Trial(len(layers), why))
            continue
        kernel = kernel or product.product_for(weights)
        trials.append(_try_product(kernel, weights, layers, clock))
    used = pays(trials)
    for (weights, layers), trial in zip(shapes.items(), trials, strict=True):
        if kernel is not None and used and not trial.fault:
            for layer in layers:
                product.put_in(layer, kernel, weights.dtype)
    choices = [
        choice("product", f"product of {weights}", trial, used=used)
        for weights, trial in zip(shapes, trials, strict=True)
    ]
    return [*choices, *_choose_unpacking([layer for layers in shapes.values() for layer in layers])]


def _choose_unpacking(layers: Sequence[nn.Module]) -> list[KernelChoice]:
    """Sets the product of many rows in the layers that have a kernel for a few."""
    quantised = [each for each in layers if isinstance(each, product.RowsQuantizedLinear)]
    layers_to_unpack = [each for each in quantised if unpacked.fits(each)]
    if not layers_to_unpack:
        return []
    unpacking = unpacked.Unpacking()
    for layer in layers_to_unpack:
        layer.unpacking = unpacking
    shape = f"product of more than {product.MAX_ROWS} rows"
    why = "not timed here, where MLX's would first be compiled for half a minute"
    return [KernelChoice("unpacked_product", shape, len(layers_to_unpack), True, why)]


def _try_product(
    kernel: product.Product, weights: product.Weights, layers: list[nn.Module], clock: Clock
) -> Trial:
    x = random_rows((1, _COMPARED[-1], weights.inputs), weights.dtype, 6)

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return (product.with_bias(layers[layer], kernel(x[:, :rows], layers[layer])),)

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return (product.stock(layers[layer], x[:, :rows]),)

    trial = try_kernel(ours, stock, len(layers), weights.dtype, clock)
    one = stock(1, 0)[0]
    agree = all(mx.array_equal(stock(rows, 0)[0][:, :1], one).item() for rows in _COMPARED)
    return trial if agree else replace(trial, slack=EXACT_SLACK)
