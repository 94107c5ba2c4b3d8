"""The CPU twin of the gated-delta kernel: the same launches, shapes and device-side row counts.

A layer with this kernel leaves the same after a forward as a CUDA kernel: the convolution's rows,
the state after every row, and `RowChoice` if requests keep different numbers of rows.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
from kernel_cases import DeltaCase
from mlx import nn

from exo_node.mtp.families.taped_gated_delta import TapedGatedDelta
from exo_node.shard.kernels import gated_delta, kernel_choice


class PlainGatedDelta:
    """`GatedDelta` in mlx-lm's operations, a row at a time; lazy, as the kernel is."""

    def __init__(self, sizes: gated_delta.Sizes) -> None:
        self.sizes = sizes
        self.rows_seen: list[int] = []

    def rows(
        self,
        qkv: mx.array,
        z: mx.array,
        b: mx.array,
        a: mx.array,
        before: mx.array,
        layer: gated_delta.DeltaParameters,
        state: mx.array,
        at: mx.array | None = None,
        ends: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        self.rows_seen.append(qkv.shape[1])
        if at is not None and state.ndim == 5:
            state = state[at[0], mx.arange(qkv.shape[0])]
            before = _three_rows(before, at[1])
        case = DeltaCase(self.sizes, (qkv, z, b, a), before, layer, state)
        ys: list[mx.array] = []
        states: list[mx.array] = []
        for i in range(qkv.shape[1]):
            y, state = replace(case, inputs=case.row(i), state=state).reference()
            ys.append(y)
            states.append(state)
            row = replace(case, inputs=case.row(i)).inputs[0]
            case = replace(case, before=mx.concatenate([case.before, row], axis=1)[:, 1:])
        window = mx.concatenate([before, qkv], axis=1)
        after = mx.stack(states)
        if ends is not None:
            after = after[ends - 1, mx.arange(qkv.shape[0])]
        return mx.concatenate(ys, axis=1), window, after

    def recurrence(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        layer: gated_delta.DeltaParameters,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        return gated_delta.reference(q, k, v, a, b, layer, state)


def give_kernel(layer: Any) -> None:
    """Installs the twin in one gated-delta layer."""
    sizes = gated_delta.Sizes(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, mx.float32)
    layer.kernel = PlainGatedDelta(sizes)
    layer.fixed = kernel_choice._parameters_of(layer)  # pyright: ignore[reportPrivateUsage]


def give_kernels(model: nn.Module) -> int:
    """Installs the twin in every gated-delta layer of a model; returns their number."""
    layers = [each for _, each in model.named_modules() if isinstance(each, TapedGatedDelta)]
    for layer in layers:
        give_kernel(layer)
    return len(layers)


def _three_rows(window: mx.array, first: mx.array) -> mx.array:
    """(B, 3, C): three rows of each request's window, from its own `first` (B,)."""
    at = (first[:, None] + mx.arange(3))[:, :, None]
    return mx.take_along_axis(window, mx.broadcast_to(at, (*at.shape[:2], window.shape[2])), axis=1)
