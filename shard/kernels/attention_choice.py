"""Chooses the attention of a few rows: our kernels, or MLX's, perhaps row by row (`own_keys`)."""

from collections.abc import Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from . import row_attention
from .product import JointProducts
from .trial import (
    FEW,
    Clock,
    KernelChoice,
    Trial,
    choice,
    group_modules,
    pays,
    random_rows,
    try_kernel,
)

_CONTEXTS: Final = (24, 1100)
"""Context lengths at which attention is compared: MLX changes its kernel at 1,024 rows."""


def choose_attention(modules: Sequence[nn.Module], clock: Clock) -> list[KernelChoice]:
    """Chooses for each kind of heads. Call it after the products, which attention contains."""

    def kind_of(module: Any) -> row_attention.AttentionHeads | None:
        return row_attention.heads_of(module) if type(module) is Qwen3NextAttention else None

    kinds = group_modules(modules, kind_of)
    return [_choose_for(kind, layers, clock) for kind, layers in kinds.items()]


def _choose_for(
    kind: row_attention.AttentionHeads, layers: list[Any], clock: Clock
) -> KernelChoice:
    if why := row_attention.unfit(layers[0]):
        trial = Trial(len(layers), why)
    else:
        trial = _try_own(kind, layers, clock)
    return choice("row_attention", f"attention of {kind}", trial)


def _try_own(kind: row_attention.AttentionHeads, layers: list[Any], clock: Clock) -> Trial:
    """Tries our kernels and leaves them in the layers if they pay."""
    kernel, classes = row_attention.RowAttention(kind), [type(layer) for layer in layers]
    for layer in layers:
        layer.kernel, layer.fixed = kernel, row_attention.fixed_of(layer)
        layer.together = JointProducts(row_attention.projections(layer))
    x = random_rows((1, FEW, layers[0].o_proj.weight.shape[0]), kind.dtype, 7)
    pasts = {n: random_past(kind, n) for n in _CONTEXTS}

    def run(kind_of: type[Any], rows: int, layer: int, past: int) -> mx.array:
        module = layers[layer]
        module.__class__ = kind_of
        return module(x[:, :rows], "causal" if rows > 1 else None, cache_with(pasts[past]))

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return [run(row_attention.KernelAttention, rows, layer, past) for past in _CONTEXTS]

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return [run(classes[layer], rows, layer, past) for past in _CONTEXTS]

    trial = try_kernel(ours, stock, len(layers), kind.dtype, clock)
    for layer in layers:
        layer.__class__ = row_attention.KernelAttention
    if pays([trial]) and not _rows_agree(layers[0]):
        trial = Trial(len(layers), "its rows in blocks are not those of single steps")
    if not pays([trial]):
        for layer, kind_of in zip(layers, classes, strict=True):
            layer.__class__ = kind_of
    return trial


def random_past(kind: row_attention.AttentionHeads, rows: int) -> tuple[mx.array, mx.array]:
    """Random keys and values of `rows` rows, (1, key heads, rows, D) each."""
    shape = (1, kind.key_heads, rows, kind.size)
    return random_rows(shape, kind.dtype, 8), random_rows(shape, kind.dtype, 9)


def cache_with(past: tuple[mx.array, mx.array]) -> KVCache:
    """A cache that contains these keys and values."""
    cache = KVCache()
    cache.keys, cache.values = past
    cache.offset = past[0].shape[2]
    return cache


def _rows_agree(layer: Any) -> bool:
    """Whether a block of rows equals single steps bit for bit, at a short and a long context."""
    kind = row_attention.heads_of(layer)
    x = random_rows((1, FEW, layer.o_proj.weight.shape[0]), kind.dtype, 7)
    same = mx.array(True)
    for context in _CONTEXTS:
        past = random_past(kind, context)
        block, single = cache_with(past), cache_with(past)
        rows = layer(x, "causal", block)
        steps = [layer(x[:, i : i + 1], None, single) for i in range(FEW)]
        same &= mx.array_equal(rows, mx.concatenate(steps, axis=1))
    return cast("bool", same.item())
