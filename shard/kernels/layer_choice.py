"""Chooses the decoder layers that repeat a traced graph for a few rows with the same bits."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from ...mtp.caches.rollback import TapedCache, cache_arrays
from ...mtp.families.taped_gated_delta import TapedGatedDelta
from .attention_choice import cache_with, random_past
from .fused_choice import group_modules
from .layers import LAYERS, RowsLayer, mixer_of
from .row_attention import KernelAttention, heads_of
from .trial import FEW, Clock, KernelChoice, Run, Trial, choice, pays, random_rows, try_kernel

_CONTEXT: Final = 24
_LAYERS_PER_EVAL: Final = 8
"""Traced layers that Python builds before the GPU starts on them."""


def trace_layers(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    """Traces all kinds of layers or none. Call it last: traces contain all other kernels."""

    def key(m: Any) -> Any:
        if type(m) not in LAYERS:
            return None
        mixer = mixer_of(m)
        delta = isinstance(mixer, TapedGatedDelta) and mixer.kernel is not None
        if not delta and not isinstance(mixer, KernelAttention):
            return None
        return type(m), type(mixer), type(m.mlp), m.input_layernorm.weight.dtype

    groups = list(group_modules(modules, key).values())
    classes = {id(layer): type(layer) for layers in groups for layer in layers}
    trials = [_try_traced(layers, clock) for layers in groups]
    used, choices = pays(trials), list[KernelChoice]()
    for layers, trial in zip(groups, trials, strict=True):
        shape = "layer of gated delta" if layers[0].is_linear else "layer of attention"
        choices.append(choice("traced_layer", shape, trial, used=used and not trial.fault))
        for layer in [] if choices[-1].used else layers:
            layer.__class__ = classes[id(layer)]
    _spread_evals(modules)
    return choices


def _spread_evals(modules: Sequence[nn.Module]) -> None:
    traced: list[RowsLayer] = [module for module in modules if isinstance(module, RowsLayer)]
    for i, layer in enumerate(traced):
        layer.hands_over = i % _LAYERS_PER_EVAL == _LAYERS_PER_EVAL - 1


def _try_traced(layers: list[Any], clock: Clock) -> Trial:
    """Tries the traced layers, and leaves them traced."""
    stock_class, dtype = type(layers[0]), layers[0].input_layernorm.weight.dtype
    traced_class = LAYERS[stock_class]
    for layer in layers:
        layer.__class__ = traced_class
        layer.trace()
    x = random_rows((1, FEW, layers[0].input_layernorm.weight.shape[0]), dtype, 15)
    content = _cache_content(layers[0], dtype)

    def run(layer_class: Any, rows: int, layer: Any) -> Sequence[mx.array]:
        """The layer's rows, and the arrays of its cache afterwards."""
        cache = _cache(layer, content)
        mask = "causal" if rows > 1 and not layer.is_linear else None
        return layer_class.__call__(layer, x[:, :rows], mask, cache), *cache_arrays([cache])

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return run(traced_class, rows, layers[layer])

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return run(stock_class, rows, layers[layer])

    trial = try_kernel(ours, stock, len(layers), dtype, clock)
    if not trial.fault and not _agree(ours, stock):
        return Trial(len(layers), "its bits are not those of the layer that is not traced")
    return trial


def _cache_content(layer: Any, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Random arrays of a cache after _CONTEXT rows."""
    if not layer.is_linear:
        return random_past(heads_of(layer.self_attn), _CONTEXT)
    mixer: TapedGatedDelta = layer.linear_attn
    shape = (1, mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
    rows = random_rows((1, mixer.conv_kernel_size - 1, mixer.conv_dim), dtype, 16)
    return rows, random_rows(shape, mx.float32, 17)


def _cache(layer: Any, content: tuple[mx.array, mx.array]) -> Any:
    if not layer.is_linear:
        return cache_with(content)
    cache = TapedCache(2)
    cache[0], cache[1] = content
    return cache


def _agree(ours: Run, stock: Run) -> bool:
    for rows in (1, FEW):
        for expected, actual in zip(stock(rows, 0), ours(rows, 0), strict=True):
            if not mx.array_equal(expected, actual).item():
                return False
    return True
