"""Nemotron-H: mlx-lm's nemotron_h. The head is a NextN one whose layer is two blocks of the
backbone's kinds: one of attention and one of experts.

Names, order and norms as in vLLM's nemotron_h_mtp, which reads H after the final norm; the first
block has enorm, hnorm and eh_proj, the last one the final norm.
"""

import math
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models import nemotron_h
from mlx_lm.models.ssm import ssm_update

from ..caches.rollback import Swaps, TapedCache, TapedLayer, rows_of_each
from ..caches.window import MAX_ROLLBACK_ROWS
from .head import DraftHead, HeadSource, HiddenKind
from .nextn import NextnFamily


class TapedMamba(TapedLayer, nemotron_h.NemotronHMamba2Mixer):
    """mlx-lm's Mamba2 layer; up to MAX_ROLLBACK_ROWS rows go through the recurrence one by one.

    mlx-lm computes several rows in one product, whose numbers differ from those of single steps.
    """

    def __call__(
        self, hidden_states: mx.array, mask: mx.array | None, cache: Any = None
    ) -> mx.array:
        rows = hidden_states.shape[1]
        stock = super().__call__
        if not isinstance(cache, TapedCache) or cache.lengths is not None:
            return stock(hidden_states, mask, cache)
        if rows == 1 or rows > MAX_ROLLBACK_ROWS:
            return self.by_stock(cache, rows, lambda: stock(hidden_states, mask, cache))
        return self._row_by_row(hidden_states, cache)

    def _row_by_row(self, hidden_states: mx.array, cache: TapedCache) -> mx.array:
        batch, rows, _ = hidden_states.shape
        inner, width = self.intermediate_size, self.conv_kernel_size - 1
        ends = [inner, inner + self.conv_dim]
        gate, conv_input, dt = mx.split(self.in_proj(hidden_states), ends, axis=-1)
        before, first = cache[0], cache[1]
        if before is None:
            before = mx.zeros((batch, width, self.conv_dim), dtype=conv_input.dtype)
        window = mx.concatenate([before, conv_input], axis=1)
        inputs = nn.silu(self.conv1d(window))
        x, b, c = mx.split(inputs, [inner, inner + self.n_groups * self.ssm_state_size], axis=-1)
        x = x.reshape(batch, rows, self.num_heads, self.head_dim)
        b, c = (a.reshape(batch, rows, self.n_groups, self.ssm_state_size) for a in (b, c))

        limits = self.time_step_limit or (0.0, math.inf)

        def step(row: int, state: mx.array | None) -> tuple[mx.array, mx.array]:
            at = slice(row, row + 1)
            inputs = (x[:, at], self.A_log, b[:, at], c[:, at], self.D.astype(x.dtype), dt[:, at])
            return ssm_update(*inputs, self.dt_bias, state, limits)

        def restore(count: int) -> list[mx.array | None]:
            state = first
            for row in range(count):
                state = step(row, state)[1]
            return [mx.contiguous(window[:, count : count + width]), state]

        def restore_each(at: mx.array) -> list[mx.array | None]:
            counts, state = at[1], first
            for row in range(rows):
                after = step(row, state)[1]
                keeps = (row < counts)[:, None, None, None]
                state = after if state is None else mx.where(keeps, after, state)
            return [rows_of_each(window, counts, width), state]

        outputs, state = list[mx.array](), first
        for row in range(rows):
            out, state = step(row, state)
            outputs.append(out)
        cache.cache = [mx.contiguous(window[:, -width:]), state]
        cache.record(rows, restore, restore_each)
        cache.advance(rows)
        y = mx.concatenate(outputs, axis=1).reshape(batch, rows, inner)
        return self.out_proj(self.norm(y, gate))


class HeadBlocks(nn.Module):
    """The head's blocks of attention and of experts, in place of a decoder layer."""

    def __init__(self, args: nemotron_h.ModelArgs) -> None:
        super().__init__()
        self.layers = [nemotron_h.NemotronHBlock(args, kind) for kind in "*E"]

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        for block in self.layers:
            x = block(x, mask, cache)
        return x


class NemotronFamily(NextnFamily):
    """The backbone has Mamba2 layers, which need a tape."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("post_norm",)
    swaps: ClassVar[Swaps] = {nemotron_h.NemotronHMamba2Mixer: TapedMamba}
    body = "backbone"

    def embed(self, tokens: mx.array) -> mx.array:
        return self._body.embeddings(tokens)

    def make_head(self) -> DraftHead:
        args = self._model.args
        return self.head_of(HeadBlocks(args), args.layer_norm_epsilon)

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        """The checkpoint's tensors as the head's parameters; the model class stacks the experts."""
        return self._as_in_backbone(source, "layers.", "backbone.layers.")
