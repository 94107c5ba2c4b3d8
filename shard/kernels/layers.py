"""Decoder layers whose graph for a few rows is traced once and then repeated.

On a GPU the host bounds a step: building an operation in Python costs several times as much as
repeating it with `mx.compile`. Work that depends on the length of the context stays outside.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_5, qwen3_next

from .fused import RowsMLP
from .product import sum_with

MAX_ROWS = 16
"""The most rows, of all sequences together. Each number of rows has its own trace."""

Arrays = tuple[mx.array, ...]


class RowsLayer(nn.Module):
    """Replaces the class of a decoder layer whose attention or recurrence has kernels."""

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
        if batch * rows > MAX_ROWS or not mixer.takes(rows, mask, cache):
            return cast("Any", super()).__call__(x, mask, cache)
        if cast("Any", self).is_linear:
            recurrence = mixer.start_of(cache, batch, x.dtype)
            *output, window, last, states, state = self.before(x, *recurrence)
            mixer.commit(cache, rows, recurrence, (window, last, states, state))
        else:
            first = mixer.first_positions(cache, x)
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
        out, *state_arrays = mixer.few_rows(m.input_layernorm(x), before, state, at)
        return *self.rest(sum_with(mixer.out_proj, out, x)), *state_arrays

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
