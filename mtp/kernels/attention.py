"""Attention of a few rows as that of single rows, in MLX's own kernels.

MLX's attention on CUDA depends on how many rows are asked and is not fused at every head size. Each
row of a verify is therefore asked by itself, over the keys that a single step would see.

That alone is not the same kernel. From 256 keys on, MLX takes cuDNN for one row of 16 bits, but
only where the keys lie in a buffer of a multiple of 256 rows. What a buffer has grown to depends
on how many rows each forward wrote, so drafts would choose the kernel; and cuDNN gives more than
one result for the same keys. Buffers here therefore never have such a size.
"""

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
    """Qwen's gated attention, a row at a time for 2 to MAX_ROWS rows over a plain cache."""

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        rows, m = x.shape[1], cast("Any", self)
        if type(cache) is KVCache:
            make_room(cache, rows, (x.shape[0], m.num_key_value_heads, m.head_dim), x.dtype)
        if type(cache) is not KVCache or not 1 < rows <= MAX_ROWS:
            return super().__call__(x, mask, cache)
        size, first = m.head_dim, cache.offset

        def heads(projected: mx.array, count: int) -> mx.array:
            return projected.reshape(x.shape[0], rows, count, -1)

        asked, gate = mx.split(heads(m.q_proj(x), m.num_attention_heads), [size], axis=-1)
        gate = gate.reshape(x.shape[0], rows, -1)
        q = _turned(m, m.q_norm(asked).swapaxes(1, 2), first)
        k = _turned(m, m.k_norm(heads(m.k_proj(x), m.num_key_value_heads)).swapaxes(1, 2), first)
        v = heads(m.v_proj(x), m.num_key_value_heads).swapaxes(1, 2)
        k, v = cast("tuple[mx.array, mx.array]", cache.update_and_fetch(k, v))
        each = [
            mx.fast.scaled_dot_product_attention(
                q[:, :, i : i + 1],
                k[:, :, : first + i + 1],
                v[:, :, : first + i + 1],
                scale=m.scale,
                mask=None,
            )
            for i in range(rows)
        ]
        out = mx.concatenate(each, axis=2).swapaxes(1, 2).reshape(x.shape[0], rows, -1)
        return m.o_proj(out * mx.sigmoid(gate))


def _turned(attention: Any, x: mx.array, first: int) -> mx.array:
    """(B, heads, n, D) with rotary positions from `first` on, each row by itself."""
    each = [attention.rope(x[:, :, i : i + 1], offset=first + i) for i in range(x.shape[2])]
    return mx.concatenate(each, axis=2)


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
