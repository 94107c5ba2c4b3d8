"""DeepSeek-V3.2 and GLM-5: mlx-lm's deepseek_v32, and glm_moe_dsa, which is a subclass of it.

Latent attention to the rows that an indexer of each layer chooses. The head's layer has an indexer
of its own, as in vLLM's deepseek_mtp, so its cache has two parts as well.
"""

from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache

from ..caches.rollback import RowCache, Swaps
from .latent_attention import MAX_BLOCK_ROWS, scores_of_rows
from .nextn import NextnFamily


class DeepseekV32BlockAttention(deepseek_v32.DeepseekV32Attention):
    """mlx-lm's attention whose blocks of few rows are computed as their single rows are.

    A single row gathers the rows that its indexer chooses and works on latents. A block masks the
    others out and projects every latent, so its sums would round differently. So caches are written
    once, and each row attends by itself to the rows up to its own.
    """

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        batch, rows, _ = x.shape
        if cache is None or batch == rows == 1 or rows > MAX_BLOCK_ROWS:
            return super().__call__(x, mask, cache)
        low = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(low).reshape(batch, rows, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_pe = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        offset = cache[0].offset
        q_pe, k_pe = self.rope(q_pe, offset), self.rope(k_pe[:, None], offset)
        latent, k_pe = cache[0].update_and_fetch(self.kv_a_layernorm(latent)[:, None], k_pe)
        index_queries, index_keys, weights = self._index(x, low, cache[1])
        cache[0].keys = mx.depends(cache[0].keys, (cache[1].keys, cache[1].values))
        q_nope = self.embed_q(q_nope)
        out = list[mx.array]()
        for row in range(rows):
            end = latent.shape[2] - (rows - 1 - row)
            one = slice(row, row + 1)
            row_mask = None if batch == 1 else _row_of(mask, row, end)
            chosen = self._choose(
                index_queries[:, :, one], index_keys[:, :, :end], weights[:, :, one], row_mask
            )
            keys, rotary = latent[:, :, :end], k_pe[:, :, :end]
            if chosen is not None:
                keys, rotary = (_gather(each, chosen) for each in (keys, rotary))
                if row_mask is not None:
                    row_mask = mx.take_along_axis(row_mask, chosen, axis=-1)
            scores = scores_of_rows(q_pe[:, :, one], rotary, self.scale)
            if row_mask is not None:
                lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
                scores = mx.where(row_mask, scores, lowest)
            out.append(
                scaled_dot_product_attention(
                    q_nope[:, :, one], keys, keys, cache=cache, scale=self.scale, mask=scores
                )
            )
        joined = self.unembed_out(mx.concatenate(out, axis=2))
        return self.o_proj(joined.transpose(0, 2, 1, 3).reshape(batch, rows, -1))

    def _index(self, x: mx.array, low: mx.array, cache: Any) -> tuple[mx.array, mx.array, mx.array]:
        """The indexer's queries (B, heads, n, D) of rows, all keys (B, 1, N, D), which are cached,
        and the weights (B, heads, n, 1) of its heads."""
        indexer, (batch, rows, _) = self.indexer, x.shape
        q = indexer.wq_b(low).reshape(batch, rows, indexer.n_heads, -1).swapaxes(1, 2)
        k = indexer.k_norm(indexer.wk(x))[:, None]
        q, k = indexer.rope(q, offset=cache.offset), indexer.rope(k, offset=cache.offset)
        k, _ = cache.update_and_fetch(k, k)
        cache.values = mx.zeros_like(cache.keys)  # unread: else its graph would grow for ever
        scale = indexer.n_heads**-0.5 * indexer.softmax_scale
        weights = indexer.weights_proj(x) * scale
        return q, k, weights.swapaxes(-1, -2)[..., None]

    def _choose(
        self, q: mx.array, k: mx.array, weights: mx.array, mask: mx.array | None
    ) -> mx.array | None:
        """The rows (B, 1, 1, index_topk) that one row attends to, or None for all."""
        top = self.indexer.index_topk
        if k.shape[2] <= top:
            return None
        scores = mx.maximum(scores_of_rows(q, k), 0) * weights
        scores = scores.sum(axis=1, keepdims=True)
        if mask is not None:
            scores = mx.where(mask, scores, -float("inf"))
        return mx.argpartition(scores, kth=-top, axis=-1)[..., -top:]


def _row_of(mask: mx.array | None, row: int, end: int) -> mx.array | None:
    return None if mask is None else mask[..., row : row + 1, :end]


def _gather(rows: mx.array, chosen: mx.array) -> mx.array:
    """(B, 1, N, D) -> (B, 1, index_topk, D): the rows `chosen` (B, 1, 1, index_topk)."""
    at = chosen[:, :, 0, :, None]
    return mx.take_along_axis(rows, mx.broadcast_to(at, (*at.shape[:-1], rows.shape[-1])), axis=2)


class DeepseekV32Family(NextnFamily):
    """The cache holds latents and rotary keys, and beside them the indexer's keys."""

    swaps: ClassVar[Swaps] = {deepseek_v32.DeepseekV32Attention: DeepseekV32BlockAttention}
    array_mask = True

    def make_cache(self) -> RowCache:
        return CacheList(KVCache(), KVCache())
