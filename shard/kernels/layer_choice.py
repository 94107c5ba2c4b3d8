"""Which decoder layers repeat a traced graph for a few rows: those whose bits stay the same."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from ...mtp.rollback import TapedCache, TapedGatedDelta, cache_arrays
from .attention_choice import holding, past_of
from .fused_choice import grouped
from .layers import LAYERS, RowsLayer, mixer_of
from .row_attention import KernelAttention, heads_of
from .trial import FEW, Choice, Clock, Run, Trial, choice, pays, random_rows, try_kernel

_CONTEXT: Final = 24
_HANDED_OVER: Final = 8
"""Traced layers that Python builds before the GPU begins with them."""


def trace_layers(modules: Sequence[nn.Module], clock: Clock) -> list[Choice]:
    """After all other kernels, which become part of the traces. For all kinds of layers or none."""

    def key(m: Any) -> Any:
        if type(m) not in LAYERS:
            return None
        mixer = mixer_of(m)
        delta = isinstance(mixer, TapedGatedDelta) and mixer.kernel is not None
        if not delta and not isinstance(mixer, KernelAttention):
            return None
        return type(m), type(mixer), type(m.mlp), m.input_layernorm.weight.dtype

    groups = list(grouped(modules, key).values())
    before = {id(layer): type(layer) for layers in groups for layer in layers}
    trials = [_trial(layers, clock) for layers in groups]
    used, chosen = pays(trials), list[Choice]()
    for layers, tried in zip(groups, trials, strict=True):
        shape = "layer of gated delta" if layers[0].is_linear else "layer of attention"
        chosen.append(choice("traced_layer", shape, tried, used=used and not tried.fault))
        for layer in [] if chosen[-1].used else layers:
            layer.__class__ = before[id(layer)]
    _hand_over(modules)
    return chosen


def _hand_over(modules: Sequence[nn.Module]) -> None:
    traced: list[RowsLayer] = [module for module in modules if isinstance(module, RowsLayer)]
    for i, layer in enumerate(traced):
        layer.hands_over = i % _HANDED_OVER == _HANDED_OVER - 1


def _trial(layers: list[Any], clock: Clock) -> Trial:
    """Leaves them traced."""
    before, dtype = type(layers[0]), layers[0].input_layernorm.weight.dtype
    kind = LAYERS[before]
    for layer in layers:
        layer.__class__ = kind
        layer.trace()
    x = random_rows((1, FEW, layers[0].input_layernorm.weight.shape[0]), dtype, 15)
    held = _held(layers[0], dtype)

    def run(by: Any, rows: int, layer: Any) -> Sequence[mx.array]:
        """The layer's rows, and what it leaves in its cache."""
        cache = _cache(layer, held)
        mask = "causal" if rows > 1 and not layer.is_linear else None
        return by.__call__(layer, x[:, :rows], mask, cache), *cache_arrays([cache])

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return run(kind, rows, layers[layer])

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return run(before, rows, layers[layer])

    tried = try_kernel(ours, stock, len(layers), dtype, clock)
    if not tried.fault and not _same(ours, stock):
        return Trial(len(layers), "its bits are not those of the layer that is not traced")
    return tried


def _held(layer: Any, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """What a cache holds of _CONTEXT rows."""
    if not layer.is_linear:
        return past_of(heads_of(layer.self_attn), _CONTEXT)
    mixer: TapedGatedDelta = layer.linear_attn
    shape = (1, mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
    rows = random_rows((1, mixer.conv_kernel_size - 1, mixer.conv_dim), dtype, 16)
    return rows, random_rows(shape, mx.float32, 17)


def _cache(layer: Any, held: tuple[mx.array, mx.array]) -> Any:
    if not layer.is_linear:
        return holding(held)
    cache = TapedCache(2)
    cache[0], cache[1] = held
    return cache


def _same(ours: Run, stock: Run) -> bool:
    for rows in (1, FEW):
        for wanted, got in zip(stock(rows, 0), ours(rows, 0), strict=True):
            if not mx.array_equal(wanted, got).item():
                return False
    return True
