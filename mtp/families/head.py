"""A draft head, its tensors, and the way from one to the other.

For row i, with the target's hidden H_i and the next token t: x = eh_proj([enorm(embed(t));
hnorm(H_i)]), one decoder layer with attention. The shared lm_head of norm(x) predicts the token
after t, and x or norm(x) takes the place of H for the next depth: order and norms as in vLLM's
qwen3_5_mtp and deepseek_mtp, in transformers' MtpModel and SGLang's glm4_moe_nextn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask

from ..caches.rollback import RowCache, parts_of

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


class HeadUnusable(Exception):
    """Why a head that was found cannot be used, and what to do about it."""


class DraftHead(nn.Module):
    """A draft head, whose layer keeps its rows in a cache like the backbone's."""

    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        eps: float,
        hidden_kind: HiddenKind,
        make_cache: Callable[[], RowCache],
        *,
        array_mask: bool = False,
        window: int | None = None,
        hidden_first: bool = False,
    ) -> None:
        """`layer` takes (x, mask, cache), and attends to `window` rows, or to all.

        `array_mask`: its mask has to be an array. `hidden_first`: `eh_proj` takes hidden states
        before embeddings.
        """
        super().__init__()
        self.enorm = nn.RMSNorm(hidden_size, eps=eps)
        self.hnorm = nn.RMSNorm(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_kind: HiddenKind = hidden_kind
        self.make_cache = make_cache
        self._window = window
        self._array_mask = array_mask
        self._hidden_first = hidden_first

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: RowCache) -> mx.array:
        """Hidden and embedding of the following tokens, (1, n, H) each -> (1, n, H); cached.

        The result takes the place of the hidden states at the next depth.
        """
        dtype = self.enorm.weight.dtype  # float32 on CPUs for unquantised experts
        parts = [self.enorm(embedding.astype(dtype)), self.hnorm(hidden.astype(dtype))]
        if self._hidden_first:
            parts.reverse()
        x = self.eh_proj(mx.concatenate(parts, axis=-1))
        mask = create_attention_mask(
            x, parts_of(cache)[0], window_size=self._window, return_array=self._array_mask
        )
        x = cast(Any, self.layer)(x, mask, cache)
        if self.hidden_kind == "post_norm":
            x = self.norm(x)
        return x.astype(hidden.dtype)

    def read_out(self, output: mx.array) -> mx.array:
        """The head's output (1, n, H) -> the input of the shared lm_head."""
        return output if self.hidden_kind == "post_norm" else self.norm(output)


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A name whose beginning is replaced by the first of `names` that fits."""
    stem = next(each for each in names if name.startswith(each))
    return names[stem] + name.removeprefix(stem)
