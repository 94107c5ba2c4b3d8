"""Attention of a few rows as that of single rows, in MLX's own kernels.

The result of MLX's attention on CUDA depends on the number of query rows, and it is not fused at
every head size. Each row of a verify is therefore computed by itself, over the keys that a single
step would read.

That alone is not the same kernel. From 256 keys on, MLX takes cuDNN for one row of 16 bits, but
only where the keys lie in a buffer of a multiple of 256 rows. The size that a buffer has grown to
depends on how many rows each forward wrote, so drafts would choose the kernel; and cuDNN gives more
than one result for the same keys. Buffers here therefore never have such a size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from ...mtp.placed_rope import is_in_three, rope_of_rows

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
        if first is None or is_in_three(m.rope):
            return super().__call__(x, mask, cache)
        size, plain_cache = m.head_dim, cast("KVCache", cache)

        def split_heads(projected: mx.array, count: int) -> mx.array:
            return projected.reshape(batch, rows, count, -1)

        queries, gate = mx.split(split_heads(m.q_proj(x), m.num_attention_heads), [size], axis=-1)
        gate = gate.reshape(batch, rows, -1)
        q = _rotate(m, m.q_norm(queries).swapaxes(1, 2), first)
        k = _rotate(
            m, m.k_norm(split_heads(m.k_proj(x), m.num_key_value_heads)).swapaxes(1, 2), first
        )
        v = split_heads(m.v_proj(x), m.num_key_value_heads).swapaxes(1, 2)
        k, v = cast("tuple[mx.array, mx.array]", plain_cache.update_and_fetch(k, v))

        def attend(b: int, i: int) -> mx.array:
            one, past = slice(b, b + 1), slice(first[b] + i + 1)
            return mx.fast.scaled_dot_product_attention(
                q[one, :, i : i + 1], k[one, :, past], v[one, :, past], scale=m.scale, mask=None
            )

        out = _concatenate_rows(attend, batch, rows).swapaxes(1, 2).reshape(batch, rows, -1)
        return m.o_proj(out * mx.sigmoid(gate))


def rows_before(cache: object, batch: int, rows: int) -> list[int] | None:
    """The number of rows in each request's cache, if this forward is computed row by row.

    None if it is not: one row of one request, more than MAX_ROWS rows, another kind of cache, or
    rows that only the device counts.
    """
    if rows > MAX_ROWS:
        return None
    if type(cache) is KVCache:
        return [cache.offset] * batch if rows > 1 else None
    return cast("list[int] | None", getattr(cache, "known_rows", None))


def _rotate(attention: Any, x: mx.array, first: Sequence[int]) -> mx.array:
    """Applies rotary positions row by row: x (B, heads, n, D), request b from `first[b]` on."""

    rope, positions = rope_of_rows(attention.rope, first)

    def rotate_row(b: int, i: int) -> mx.array:
        return rope(x[b : b + 1, :, i : i + 1], offset=positions[b] + i)

    return _concatenate_rows(rotate_row, x.shape[0], x.shape[2])


def _concatenate_rows(row: Callable[[int, int], mx.array], batch: int, rows: int) -> mx.array:
    """Joins the results of `row(request, index)`, (1, heads, 1, D) each, to (B, heads, n, D)."""
    requests = [mx.concatenate([row(b, i) for i in range(rows)], axis=2) for b in range(batch)]
    return mx.concatenate(requests)


def make_room(cache: KVCache, rows: int, sizes: tuple[int, int, int], dtype: mx.Dtype) -> None:
    """Grows a cache by `rows` rows, to buffers whose size does not choose the kernel.

    `sizes`: batch, heads and the size of a head, needed while the cache is empty.
    """
    needed = cache.offset + rows
    extent = 0 if cache.keys is None else cache.keys.shape[2]
    if extent >= needed and extent % CUDNN_STEP:
        return
    batch, heads, width = sizes
    capacity = -(-needed // CUDNN_STEP) * CUDNN_STEP + _BESIDE
    spare = mx.zeros((batch, heads, capacity - cache.offset, width), dtype)
    keys = [] if cache.keys is None else [cache.keys[..., : cache.offset, :]]
    cache.keys = mx.concatenate([*keys, spare], axis=2)
    values = [] if cache.values is None else [cache.values[..., : cache.offset, :]]
    cache.values = mx.concatenate([*values, spare], axis=2)
