"""The interface of a draft head, its tensors, and the head of Qwen3-Next, 3.5 and 3.6.

For row i, with the target's hidden H_i and the next token t: x = fc([norm(embed(t)); norm(H_i)]),
one full-attention decoder layer, y = norm(x). The shared lm_head of y predicts the token after t;
y takes the place of H for the next depth. Order and norms as in vLLM's qwen3_5_mtp and in
transformers' MtpModel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..caches.rollback import RowCache

HiddenKind = Literal["post_norm", "pre_norm"]
"""The backbone's hidden states that a head reads: after the final norm or before it."""


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A head's tensors under their canonical names (`fc.weight`, …), lazily loaded.

    `backbone_is_raw`: whether the backbone stores norms as w - 1; None if the head has a file of
    its own, whose layout may differ.
    """

    tensors: Mapping[str, mx.array]
    backbone_is_raw: bool | None


@dataclass(frozen=True, slots=True)
class HeadUnusable:
    """Why a head that was found cannot be used, and what to do about it."""

    reason: str


class DraftHead(Protocol):
    """A draft head: a module whose layer keeps its rows in a cache like the backbone's."""

    hidden_kind: HiddenKind

    @property
    def make_cache(self) -> Callable[[], RowCache]:
        """Makes the layer's cache, without rows."""
        ...

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        """Hidden and embedding of the following tokens, (1, n, H) each -> (1, n, H); cached.

        The result takes the place of the hidden states at the next depth.
        """
        ...

    def read_out(self, output: mx.array) -> mx.array:
        """The head's output (1, n, H) -> the input of the shared lm_head."""
        ...


class MtpHead(nn.Module):
    """Qwen's draft head. Parameter names are the checkpoint's, without their prefix."""

    hidden_kind: HiddenKind = "post_norm"
    make_cache = KVCache

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
