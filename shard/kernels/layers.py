"""Decoder layers whose graph for a few rows is traced once and then repeated.

On a GPU the host bounds a step: an operation that Python builds costs several times what it costs
`mx.compile` to repeat it. What depends on the length of the context stays outside of a trace.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_5, qwen3_next

from .fused import RowsMLP
from .product import sum_with

MAX_ROWS = 16
"""Of all sequences together. Each number of rows is a trace of its own."""

Arrays = tuple[mx.array, ...]


class RowsLayer(nn.Module):
    """Stands in for a decoder layer whose attention or recurrence has kernels."""

    before: Callable[..., Arrays]
    """`up_to_the_cache` or `with_the_recurrence`, traced; `trace` sets it and `after`."""
    after: Callable[[mx.array, mx.array], Arrays]
    hands_over: bool = False
    """Whether the GPU begins with what is built so far, while Python builds the layers behind.

    For the rows of a verify only: a plain step is built while the GPU has the step before it.
    """

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        mixer: Any = mixer_of(self)
        batch, rows, _ = x.shape
        if batch * rows > MAX_ROWS or not mixer.takes(rows, mask, cache):
            return cast("Any", super()).__call__(x, mask, cache)
        if cast("Any", self).is_linear:
            held = mixer.held(cache, batch, x.dtype)
            *made, window, last, states, state = self.before(x, *held)
            mixer.wrote(cache, rows, held, (window, last, states, state))
        else:
            first = mixer.first_of(cache, x)
            wide, q, k, v = self.before(x, first)
            made = self.after(mixer.attended(wide, q, k, v, first, cache), x)
        y = self.behind(made)
        if self.hands_over and rows > 1:
            mx.async_eval(y)
        return y

    def with_the_recurrence(
        self, x: mx.array, before: mx.array, state: mx.array, at: mx.array
    ) -> Arrays:
        m = cast("Any", self)
        mixer = m.linear_attn
        out, *written = mixer.few_rows(m.input_layernorm(x), before, state, at)
        return *self.rest(sum_with(mixer.out_proj, out, x)), *written

    def up_to_the_cache(self, x: mx.array, first: mx.array) -> Arrays:
        m = cast("Any", self)
        return m.self_attn.asked(m.input_layernorm(x), first)

    def behind_the_cache(self, attended: mx.array, x: mx.array) -> Arrays:
        return self.rest(sum_with(cast("Any", self).self_attn.o_proj, attended, x))

    def rest(self, h: mx.array) -> Arrays:
        """The layer's result, or what `behind` makes it of: a trace rounds experts otherwise."""
        m = cast("Any", self)
        normed = m.post_attention_layernorm(h)
        return (m.mlp(normed, h),) if isinstance(m.mlp, RowsMLP) else (h, normed)

    def behind(self, made: Sequence[mx.array]) -> mx.array:
        if len(made) == 1:
            return made[0]
        h, normed = made
        return h + cast("Any", self).mlp(normed)

    def trace(self) -> None:
        """Weights become part of the traces: they may not be replaced afterwards."""
        if cast("Any", self).is_linear:
            self.before = mx.compile(self.with_the_recurrence)
        else:
            self.before = mx.compile(self.up_to_the_cache)
            self.after = mx.compile(self.behind_the_cache)


class RowsLayer35(RowsLayer, qwen3_5.DecoderLayer):
    """Of Qwen3.5 and 3.6."""


class RowsLayerNext(RowsLayer, qwen3_next.Qwen3NextDecoderLayer):
    """Of Qwen3-Next."""


LAYERS: dict[type[nn.Module], type[RowsLayer]] = {
    qwen3_5.DecoderLayer: RowsLayer35,
    qwen3_next.Qwen3NextDecoderLayer: RowsLayerNext,
}


def mixer_of(layer: Any) -> Any:
    """Its attention or recurrence."""
    return layer.linear_attn if layer.is_linear else layer.self_attn
