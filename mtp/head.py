"""What a draft head is, and the one of Qwen3-Next, 3.5 and 3.6.

For row i, with the target's hidden H_i and the next token t: x = fc([norm(embed(t)); norm(H_i)]),
one full-attention decoder layer, y = norm(x). The shared lm_head of y predicts the token after t;
y takes the place of H for the next depth. Order and norms as in vLLM's qwen3_5_mtp and in
transformers' MtpModel.
"""

from typing import Literal, Protocol

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

HiddenKind = Literal["post_norm", "pre_norm"]
"""Which hidden of the backbone a head is fed: after its final norm or before it."""


class DraftHead(Protocol):
    """A head as drafting uses it; a module, whose layer keeps its rows in a plain KVCache."""

    hidden_kind: HiddenKind

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: KVCache) -> mx.array:
        """(1, n, H) hidden and embedding of the following tokens -> (1, n, H), cached.

        The result takes the place of the hidden for the next depth.
        """
        ...

    def read_out(self, output: mx.array) -> mx.array:
        """(1, n, H) of the head's output -> what the shared lm_head turns into draft logits."""
        ...


class MtpHead(nn.Module):
    """Parameter names are those of the checkpoint, without their prefix."""

    hidden_kind: HiddenKind = "post_norm"

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        """`layer`: a decoder layer of the family with attention, taking (x, mask, cache)."""
        super().__init__()
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: KVCache) -> mx.array:
        dtype = self.norm.weight.dtype  # float32 on CPUs for unquantised experts
        e, h = embedding.astype(dtype), hidden.astype(dtype)
        parts = [self.pre_fc_norm_embedding(e), self.pre_fc_norm_hidden(h)]
        x = self.fc(mx.concatenate(parts, axis=-1))
        x = self.layers[0](x, mask=create_attention_mask(x, cache), cache=cache)
        return self.norm(x).astype(hidden.dtype)

    def read_out(self, output: mx.array) -> mx.array:
        return output
