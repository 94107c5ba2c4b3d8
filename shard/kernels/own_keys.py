"""Attention of a few rows, each by itself over the keys that its single step would read.

MLX chooses the kernel of attention by the number of rows and of keys, and each kernel sums in its
own order: on Metal from some border of keys on, on CUDA always. Where a measurement finds that, the
name `scaled_dot_product_attention` in the modules of the model's layers is replaced, so this works
for every class of mlx-lm whose caches keep one row for each token, plain, with a window, or of a
batch.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import scaled_dot_product_attention as stock
from mlx_lm.models.cache import KVCache

from ...mtp.caches.batch_caches import BatchKVCache
from ...mtp.caches.window import MAX_ROLLBACK_ROWS, KeySpan, WindowCache
from . import cuda, row_groups
from .key_sets import AttentionKind, RowLimits, agreeing_limits
from .trial import KernelChoice

NAME: Final = "own_keys"
_SEAM: Final = stock.__name__
_CUDNN_SIZE: Final = 128
"""The largest heads that cuDNN's attention takes."""


def group_keys(modules: Sequence[nn.Module], run: Callable[[], object]) -> tuple[KernelChoice, ...]:
    """Measures each kind of attention in `modules` and replaces it where rows of blocks differ.

    `run` builds the graph of a forward of two rows; nothing of it is computed. Returns what was
    found of each kind. Measures nothing on CPUs, where rows agree.
    """
    if not row_groups.may_depend_on_rows():
        return ()
    attention = OwnKeys()
    names = _modules_of(modules)
    _set(names, attention.record)
    try:
        _ = run()
    finally:
        _set(names, stock)
    attention.limits = {kind: agreeing_limits(kind, _attend) for kind in attention.calls}
    choices = tuple(
        KernelChoice(NAME, str(kind), attention.calls[kind], not limits.is_all, str(limits))
        for kind, limits in attention.limits.items()
    )
    if any(choice.used for choice in choices):
        _set(names, attention)
    return choices


def _modules_of(layers: Iterable[nn.Module]) -> list[Any]:
    """The Python modules of the layers' classes that call mlx-lm's attention by its name."""
    names = {kind.__module__ for layer in layers for kind in type(layer).__mro__}
    modules = [sys.modules[name] for name in sorted(names)]
    return [each for each in modules if hasattr(each, _SEAM)]


def _set(modules: Iterable[Any], function: Callable[..., mx.array]) -> None:
    for module in modules:
        setattr(module, _SEAM, function)


class OwnKeys:
    """Attention in place of mlx-lm's function: whole blocks within `limits`, else row by row."""

    def __init__(self) -> None:
        self.limits: dict[AttentionKind, RowLimits] = {}
        """Kinds that were not measured are computed row by row."""
        self.calls: dict[AttentionKind, int] = {}
        """The number of layers of each kind."""

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if _is_step(queries, keys, mask):
            return one_row(queries, keys, values, scale, sinks=sinks)
        spans = spans_of(queries, keys, cache, mask)
        if spans is None or self._may_be_whole(queries, keys, values, cache, sinks):
            return stock(queries, keys, values, cache, scale, mask, sinks)
        return row_by_row(queries, keys, values, spans, scale, mask, sinks, slots_of(cache))

    def _may_be_whole(
        self, queries: mx.array, keys: mx.array, values: mx.array, cache: Any, sinks: Any
    ) -> bool:
        limits = self.limits.get(_kind_of(queries, keys, values, cache, sinks), RowLimits(0, 0))
        return queries.shape[2] <= limits.rows and keys.shape[2] <= limits.keys

    def record(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """mlx-lm's attention; notes the kind of the call."""
        if spans_of(queries, keys, cache, mask) is not None:
            kind = _kind_of(queries, keys, values, cache, sinks)
            self.calls[kind] = self.calls.get(kind, 0) + 1
        return stock(queries, keys, values, cache, scale, mask, sinks)


def _kind_of(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, sinks: Any
) -> AttentionKind:
    window = getattr(cache, "max_size", None)
    return AttentionKind(
        queries.shape[1],
        keys.shape[1],
        queries.shape[3],
        values.shape[3],
        queries.dtype,
        has_sinks=sinks is not None,
        window=window if isinstance(window, int) else 0,
    )


def spans_of(queries: mx.array, keys: Any, cache: Any, mask: Any) -> list[list[KeySpan]] | None:
    """The keys that each row of each request would read in its single step.

    None where the call is one: a single step, a chunk of a prompt, rows of an image that see each
    other (`RopePositions.joined`), or keys that are quantised or that a cache of another kind
    keeps.
    """
    batch, rows = queries.shape[0], queries.shape[2]
    if rows > MAX_ROLLBACK_ROWS or not isinstance(keys, mx.array):
        return None
    if isinstance(mask, mx.array) and mask.ndim not in (2, 4):
        return None
    if isinstance(cache, BatchKVCache):
        return cache.key_spans(rows)
    if rows == 1:
        return None
    if type(cache) is WindowCache:
        return [cache.key_spans(rows)]
    if type(cache) is KVCache or mask == "causal":
        past = keys.shape[2] - rows
        return [[KeySpan(0, past + i + 1) for i in range(rows)]] * batch
    return None


def slots_of(cache: Any) -> int:
    """Requests for which the buffers of a cache have room."""
    return cache.arrays[0].shape[0] if isinstance(cache, BatchKVCache) else 1


def row_by_row(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    spans: Sequence[Sequence[KeySpan]],
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    slots: int = 1,
) -> mx.array:
    """Attention in one call for each row, (B, heads, n, D); `spans`: each row's keys. `slots`: see
    `around_cudnn`."""

    def attend(b: int, i: int, span: KeySpan) -> mx.array:
        one, read = slice(b, b + 1), slice(span.first, span.end)
        return one_row(
            queries[one, :, i : i + 1],
            keys[one, :, read],
            values[one, :, read],
            scale,
            _mask_of(mask, b, i, span),
            sinks,
            slots,
        )

    requests = [
        mx.concatenate([attend(b, i, span) for i, span in enumerate(rows)], axis=2)
        for b, rows in enumerate(spans)
    ]
    return requests[0] if len(requests) == 1 else mx.concatenate(requests)


def _is_step(queries: mx.array, keys: Any, mask: Any) -> bool:
    """Whether a call is one request's single step, which sees all of its keys."""
    return queries.shape[0] == queries.shape[2] == 1 and isinstance(keys, mx.array) and mask is None


def one_row(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    slots: int = 1,
) -> mx.array:
    """Attention of one row of one request, (1, heads, 1, D). `slots`: see `around_cudnn`."""
    if mask is None and cuda.available() and queries.shape[3] <= _CUDNN_SIZE:
        return around_cudnn(queries, keys, values, scale, sinks, slots)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def around_cudnn(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
    slots: int = 1,
) -> mx.array:
    """`one_row` by MLX's own kernel on CUDA, with the bits that it has anywhere.

    `slots`: requests of the buffers that keys and values are slices of.
    """
    batch, heads, rows, size = queries.shape
    lanes = (hidden_from_cudnn(each, slots, has_sinks=sinks is not None) for each in (keys, values))
    attend = partial(mx.fast.scaled_dot_product_attention, scale=scale)
    if sinks is None:
        groups = keys.shape[1]
        out = attend(queries.reshape(groups, heads // groups, rows, size), *lanes)
        return out.reshape(batch, heads, rows, -1)
    keys, values = lanes
    return attend(
        mx.broadcast_to(queries, (keys.shape[0], *queries.shape[1:])), keys, values, sinks=sinks
    )[:1]


def hidden_from_cudnn(array: mx.array, slots: int, *, has_sinks: bool) -> mx.array:
    """Keys or values (1, key heads, n, D) of one request, as a view that cuDNN does not take.

    For one row MLX takes cuDNN, which differs from call to call, where the buffer has B x heads x D
    x (stride of a head / stride of a row) numbers. It reads that buffer from its beginning then, so
    from other requests if there are as many as B by chance. So heads lie along the batch's axis,
    beside a new one, whose stride is 1. Sinks belong to heads: there the request is repeated, to
    another number than the buffer's requests.
    """
    if has_sinks:
        return mx.broadcast_to(array, (3 if slots == 2 else 2, *array.shape[1:]))
    return mx.expand_dims(mx.squeeze(array, 0), 1)


def _mask_of(mask: Any, b: int, i: int, span: KeySpan) -> mx.array | None:
    """The mask of one row's single step: none where it sees all of its keys."""
    if not isinstance(mask, mx.array) or (span.sees_all and mask.dtype == mx.bool_):
        return None
    row = mask[..., i : i + 1, span.first : span.end]
    return row[b : b + 1] if row.ndim == 4 and row.shape[0] > 1 else row


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, mask: Any, sinks: Any
) -> tuple[mx.array, mx.array]:
    """The attention of a block: mlx-lm's, and row by row."""
    scale, spans = queries.shape[3] ** -0.5, spans_of(queries, keys, cache, mask)
    whole = stock(queries, keys, values, cache, scale, mask, sinks)
    rows = cast("list[list[KeySpan]]", spans)
    return whole, row_by_row(queries, keys, values, rows, scale, mask, sinks, slots_of(cache))
