"""Decoder layers whose graph for a few rows is traced once and then repeated.

On a GPU the host bounds a step: building an operation in Python costs several times as much as
repeating it with `mx.compile`. Work that depends on the length of the context stays outside.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_5, qwen3_next

from ...mtp.caches.rollback import TapedCache, cache_arrays
from ...mtp.families.taped_gated_delta import TapedGatedDelta
from .attention_choice import cache_with, random_past
from .fused import RowsMLP
from .product import MAX_ROWS, sum_with
from .row_attention import KernelAttention, heads_of
from .trial import (
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

_CONTEXT: Final = 24
_ROW_STEP: Final = 16
"""Beyond so many rows of a sequence only their multiples are traced: a verify of copied drafts is
one, while the rest of a prompt has any number, and tracing each would take longer than it saves."""
_LAYERS_PER_EVAL: Final = 8
"""Traced layers that Python builds before the GPU starts on them."""

Arrays = tuple[mx.array, ...]


class RowsLayer(nn.Module):
    """Replaces the class of a decoder layer whose attention or recurrence has kernels.

    Each number of sequences and rows has its own trace, up to MAX_ROWS of all of them together.
    Other forwards run the same kernels one by one.
    """

    before: Callable[..., Arrays]
    """`up_to_the_cache` or `with_the_recurrence`, traced; `trace` sets it and `after`."""
    after: Callable[[mx.array, mx.array], Arrays]
    hands_over: bool = False
    """Whether the GPU starts on the graph so far while Python builds the layers after this one.

    Only for the rows of a verify: a plain step is built while the GPU computes the one before.
    """

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        mixer: Any = mixer_of(self)
        batch, rows, _ = x.shape
        is_traced = batch * rows <= MAX_ROWS and (rows <= _ROW_STEP or rows % _ROW_STEP == 0)
        if not is_traced or not mixer.takes(rows, mask, cache):
            return cast("Any", super()).__call__(x, mask, cache)
        if cast("Any", self).is_linear:
            recurrence = mixer.start_of(cache, batch, x.dtype)
            *output, results = self.before(x, *recurrence)
            mixer.commit(cache, rows, recurrence, results)
        else:
            first = mixer.first_positions(cache, batch)
            wide, q, k, v = self.before(x, mixer.rope_positions(first))
            output = self.after(mixer.attend(wide, q, k, v, first, cache), x)
        y = self.finish(output)
        if self.hands_over and rows > 1:
            mx.async_eval(y)
        return y

    def with_the_recurrence(
        self, x: mx.array, before: mx.array, state: mx.array, at: mx.array
    ) -> Arrays:
        m = cast("Any", self)
        mixer = m.linear_attn
        out, results = mixer.few_rows(m.input_layernorm(x), before, state, at)
        return *self.rest(sum_with(mixer.out_proj, out, x)), results

    def up_to_the_cache(self, x: mx.array, first: mx.array) -> Arrays:
        m = cast("Any", self)
        return m.self_attn.project(m.input_layernorm(x), first)

    def behind_the_cache(self, attended: mx.array, x: mx.array) -> Arrays:
        return self.rest(sum_with(cast("Any", self).self_attn.o_proj, attended, x))

    def rest(self, h: mx.array) -> Arrays:
        """The layer's result, or `finish`'s arrays: traced experts would round differently."""
        m = cast("Any", self)
        normed = m.post_attention_layernorm(h)
        return (m.mlp(normed, h),) if isinstance(m.mlp, RowsMLP) else (h, normed)

    def finish(self, output: Sequence[mx.array]) -> mx.array:
        if len(output) == 1:
            return output[0]
        h, normed = output
        return h + cast("Any", self).mlp(normed)

    def trace(self) -> None:
        """Traces the layer. Its weights become constants: they must not be replaced afterwards."""
        if cast("Any", self).is_linear:
            self.before = mx.compile(self.with_the_recurrence)
        else:
            self.before = mx.compile(self.up_to_the_cache)
            self.after = mx.compile(self.behind_the_cache)


class RowsLayer35(RowsLayer, qwen3_5.DecoderLayer):
    """A decoder layer of Qwen3.5 and 3.6."""


class RowsLayerNext(RowsLayer, qwen3_next.Qwen3NextDecoderLayer):
    """A decoder layer of Qwen3-Next."""


LAYERS: dict[type[nn.Module], type[RowsLayer]] = {
    qwen3_5.DecoderLayer: RowsLayer35,
    qwen3_next.Qwen3NextDecoderLayer: RowsLayerNext,
}


def mixer_of(layer: Any) -> Any:
    """The attention or recurrence of a decoder layer."""
    return layer.linear_attn if layer.is_linear else layer.self_attn


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
