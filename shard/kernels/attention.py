"""Attention of a few rows as that of single rows, in MLX's own kernels.

MLX's attention on CUDA depends on how many rows are asked and is not fused at every head size. Each
row of a verify is therefore asked by itself, over the keys that a single step would see.

That alone is not the same kernel. From 256 keys on, MLX takes cuDNN for one row of 16 bits, but
only where the keys lie in a buffer of a multiple of 256 rows. What a buffer has grown to depends
on how many rows each forward wrote, so drafts would choose the kernel; and cuDNN gives more than
one result for the same keys. Buffers here therefore never have such a size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention

MAX_ROWS = 16
CUDNN_STEP: Final = 256
_BESIDE: Final = 8
"""Rows that a buffer has beyond a multiple of CUDNN_STEP."""


class SingleRowAttention(Qwen3NextAttention):
    """Qwen's gated attention, a row at a time: for 2 to MAX_ROWS rows, and for requests of a batch.

    Each row of each request reads the keys that a single step of that request alone would read.
    """

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        batch, rows, m = x.shape[0], x.shape[1], cast("Any", self)
        if type(cache) is KVCache:
            make_room(cache, rows, (batch, m.num_key_value_heads, m.head_dim), x.dtype)
        first = rows_before(cache, batch, rows)
        if first is None:
            return super().__call__(x, mask, cache)
        size, held = m.head_dim, cast("KVCache", cache)

        def heads(projected: mx.array, count: int) -> mx.array:
            return projected.reshape(batch, rows, count, -1)

        asked, gate = mx.split(heads(m.q_proj(x), m.num_attention_heads), [size], axis=-1)
        gate = gate.reshape(batch, rows, -1)
        q = _turned(m, m.q_norm(asked).swapaxes(1, 2), first)
        k = _turned(m, m.k_norm(heads(m.k_proj(x), m.num_key_value_heads)).swapaxes(1, 2), first)
        v = heads(m.v_proj(x), m.num_key_value_heads).swapaxes(1, 2)
        k, v = cast("tuple[mx.array, mx.array]", held.update_and_fetch(k, v))

        def attended(b: int, i: int) -> mx.array:
            one, past = slice(b, b + 1), slice(first[b] + i + 1)
            return mx.fast.scaled_dot_product_attention(
                q[one, :, i : i + 1], k[one, :, past], v[one, :, past], scale=m.scale, mask=None
            )

        out = _row_by_row(attended, batch, rows).swapaxes(1, 2).reshape(batch, rows, -1)
        return m.o_proj(out * mx.sigmoid(gate))


def rows_before(cache: object, batch: int, rows: int) -> list[int] | None:
    """The rows that each request's cache holds, where a forward is computed row by row.

    None where it is not: one row of one request, more than MAX_ROWS rows, another kind of cache, or
    rows that only the device counts.
    """
    if rows > MAX_ROWS:
        return None
    if type(cache) is KVCache:
        return [cache.offset] * batch if rows > 1 else None
    return cast("list[int] | None", getattr(cache, "known_rows", None))


def _turned(attention: Any, x: mx.array, first: Sequence[int]) -> mx.array:
    """(B, heads, n, D) with each request's rotary positions from its `first` on, row by row."""

    def turned(b: int, i: int) -> mx.array:
        return attention.rope(x[b : b + 1, :, i : i + 1], offset=first[b] + i)

    return _row_by_row(turned, x.shape[0], x.shape[2])


def _row_by_row(row: Callable[[int, int], mx.array], batch: int, rows: int) -> mx.array:
    """(B, heads, n, D) of `row(request, index)`, (1, heads, 1, D) each."""
    requests = [mx.concatenate([row(b, i) for i in range(rows)], axis=2) for b in range(batch)]
    return mx.concatenate(requests)


def make_room(cache: KVCache, rows: int, sizes: tuple[int, int, int], dtype: mx.Dtype) -> None:
    """Room for `rows` more, in buffers whose size does not choose the kernel that reads them.

    `sizes`: batch, heads and the size of a head, for a cache that holds nothing yet.
    """
    needed = cache.offset + rows
    extent = 0 if cache.keys is None else cache.keys.shape[2]
    if extent >= needed and extent % CUDNN_STEP:
        return
    batch, heads, width = sizes
    grown = -(-needed // CUDNN_STEP) * CUDNN_STEP + _BESIDE
    spare = mx.zeros((batch, heads, grown - cache.offset, width), dtype)
    held = [] if cache.keys is None else [cache.keys[..., : cache.offset, :]]
    cache.keys = mx.concatenate([*held, spare], axis=2)
    held = [] if cache.values is None else [cache.values[..., : cache.offset, :]]
    cache.values = mx.concatenate([*held, spare], axis=2)


def by_cudnn(head: int, dtype: mx.Dtype) -> bool:
    """Whether MLX may take cuDNN for a single row, by the size of a head."""
    return head <= 128 and dtype in (mx.float16, mx.bfloat16)


def attention_of(module: nn.Module) -> bool:
    """Whether `SingleRowAttention` may stand in for it."""
    return type(module) is Qwen3NextAttention
