"""Which attention serves a model's few rows: kernels of our own, MLX's row by row, or MLX's."""

from collections.abc import Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache

from . import attention, row_attention
from .product import Together
from .trial import FEW, Choice, Clock, Trial, choice, pays, random_rows, try_kernel

_CONTEXTS: Final = (24, 1100)
"""Rows behind which attention is compared: MLX changes its kernel at 1,024."""


def choose_attention(modules: Sequence[nn.Module], clock: Clock) -> list[Choice]:
    """After the products, which attention contains."""
    kinds: dict[row_attention.Heads, list[Any]] = {}
    for module in modules:
        if attention.attention_of(module):
            kinds.setdefault(row_attention.heads_of(module), []).append(module)
    return [each for kind, layers in kinds.items() for each in _of_kind(kind, layers, clock)]


def _of_kind(kind: row_attention.Heads, layers: list[Any], clock: Clock) -> list[Choice]:
    name, shape = "row_attention", f"attention of {kind}"
    if why := row_attention.unfit(layers[0]):
        tried = Trial(len(layers), why)
    else:
        tried = _own(kind, layers, clock)
        if pays([tried]):
            return [choice(name, shape, tried, used=True)]
    return [choice(name, shape, tried, used=False), _single_rows(shape, layers)]


def _own(kind: row_attention.Heads, layers: list[Any], clock: Clock) -> Trial:
    """Tries our kernels; they stay in the layers if they pay."""
    kernel, classes = row_attention.RowAttention(kind), [type(layer) for layer in layers]
    for layer in layers:
        layer.kernel, layer.fixed = kernel, row_attention.fixed_of(layer)
        layer.together = Together(row_attention.projections(layer))
    x = random_rows((1, FEW, layers[0].o_proj.weight.shape[0]), kind.dtype, 7)
    pasts = {n: past_of(kind, n) for n in _CONTEXTS}

    def by(kind_of: type[Any], rows: int, layer: int, past: int) -> mx.array:
        asked = layers[layer]
        asked.__class__ = kind_of
        return asked(x[:, :rows], "causal" if rows > 1 else None, holding(pasts[past]))

    def ours(rows: int, layer: int) -> Sequence[mx.array]:
        return [by(row_attention.KernelAttention, rows, layer, past) for past in _CONTEXTS]

    def stock(rows: int, layer: int) -> Sequence[mx.array]:
        return [by(classes[layer], rows, layer, past) for past in _CONTEXTS]

    tried = try_kernel(ours, stock, len(layers), kind.dtype, clock)
    for layer in layers:
        layer.__class__ = row_attention.KernelAttention
    if pays([tried]) and not _rows_agree(layers[0]):
        tried = Trial(len(layers), "its rows in blocks are not those of single steps")
    if not pays([tried]):
        for layer, kind_of in zip(layers, classes, strict=True):
            layer.__class__ = kind_of
    return tried


def _single_rows(shape: str, layers: list[Any]) -> Choice:
    """MLX's kernels a row at a time where a block's rows are not theirs."""
    first = layers[0]
    cudnn = attention.by_cudnn(first.head_dim, first.q_norm.weight.dtype)
    if not cudnn and _rows_agree(first):
        reason = "its rows are those of single steps here"
        return Choice("attention", shape, len(layers), False, reason)
    for layer in layers:
        layer.__class__ = attention.SingleRowAttention
    after = "are" if _rows_agree(first) else "are still not (see product)"
    before = "MLX would take cuDNN for some steps" if cudnn else "its rows in blocks were others"
    reason = f"{before}; rows of blocks {after} those of single steps"
    return Choice("attention", shape, len(layers), True, reason)


def past_of(kind: row_attention.Heads, rows: int) -> tuple[mx.array, mx.array]:
    """Random keys and values."""
    shape = (1, kind.key_heads, rows, kind.size)
    return random_rows(shape, kind.dtype, 8), random_rows(shape, kind.dtype, 9)


def holding(past: tuple[mx.array, mx.array]) -> KVCache:
    """A cache of such rows."""
    cache = KVCache()
    cache.keys, cache.values = past
    cache.offset = past[0].shape[2]
    return cache


def _rows_agree(layer: Any) -> bool:
    """Whether a block of rows is single steps bit for bit, at a short and at a long context."""
    kind = row_attention.heads_of(layer)
    x = random_rows((1, FEW, layer.o_proj.weight.shape[0]), kind.dtype, 7)
    same = mx.array(True)
    for context in _CONTEXTS:
        past = past_of(kind, context)
        block, single = holding(past), holding(past)
        got = layer(x, "causal", block)
        each = [layer(x[:, i : i + 1], None, single) for i in range(FEW)]
        same &= mx.array_equal(got, mx.concatenate(each, axis=1))
    return cast("bool", same.item())
