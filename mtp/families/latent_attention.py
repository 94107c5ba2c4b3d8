"""Multi-head latent attention whose blocks of few rows are computed as their single rows are.

Families: DeepSeek-V3 and R1 (mlx-lm's deepseek_v3), and GLM-4.7-Flash (glm4_moe_lite), in whose
head vLLM sets the embedding of a sequence's first row to zeros. transformers has no such rule for
others of the layout; one row of the head's cache depends on it, and no answer.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import scaled_dot_product_attention

from .nextn import NextnFamily

MAX_BLOCK_ROWS = 16
"""More rows than a verify has; prompts are cheaper by mlx-lm's way."""


class BlockLatentAttention:
    """To be put in front of an attention class of mlx-lm that keeps latents in its cache.

    mlx-lm projects a single row's query into the latent space, but for more rows it projects every
    cached key and value out of it: a verify would round differently from the single steps that it
    replaces, and its cost would grow with the context. Requests of a batch are computed as each is
    alone.
    """

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        batch, rows, _ = x.shape
        if cache is None or batch == rows == 1 or rows > MAX_BLOCK_ROWS:
            return super().__call__(x, mask, cache)  # pyright: ignore[reportAttributeAccessIssue]
        q = self._queries(x).reshape(batch, rows, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_pe = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        q_pe, k_pe = self.rope(q_pe, cache.offset), self.rope(k_pe[:, None], cache.offset)
        latent, k_pe = cache.update_and_fetch(self._latent(latent)[:, None], k_pe)
        scores = scores_of_rows(q_pe, k_pe, self.scale)
        if mask is not None:
            lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
            scores = mx.where(mask, scores, lowest)
        out = scaled_dot_product_attention(
            self.embed_q(q_nope), latent, latent, cache=cache, scale=self.scale, mask=scores
        )
        out = self.unembed_out(out).transpose(0, 2, 1, 3).reshape(batch, rows, -1)
        return self.o_proj(out)

    def _queries(self: Any, x: mx.array) -> mx.array:
        """(B, n, H) -> (B, n, heads * width)."""
        if "q_proj" in self:  # a config whose q_lora_rank is null
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _latent(self: Any, projected: mx.array) -> mx.array:
        """The latent of each row that the cache keeps, (B, n, kv_lora_rank)."""
        return self.kv_a_layernorm(projected)


def scores_of_rows(q: mx.array, k: mx.array, scale: float = 1) -> mx.array:
    """(q * scale) @ k, for q (B, heads, n, D) and k (B, 1, N, D), in calls as of single steps.

    MLX chooses the kernel by heads times rows, and with several requests by rows alone.
    """
    requests = [
        mx.concatenate(
            [(q[b : b + 1, :, i : i + 1] * scale) @ keys for i in range(q.shape[2])], axis=2
        )
        for b, keys in enumerate(mx.split(k.swapaxes(-1, -2), k.shape[0]))
    ]
    return mx.concatenate(requests)


@cache
def latent_family(attention: type[nn.Module]) -> type[NextnFamily]:
    """The family of models with mlx-lm's class `attention`, whose caches hold latents and rotary
    keys."""
    block = type(f"Block{attention.__name__}", (BlockLatentAttention, attention), {})
    fields = {"swaps": {attention: block}, "array_mask": True}
    return type("LatentFamily", (NextnFamily,), fields)
