"""MiMo-7B: mlx-lm's mimo, and the one layer of its head.

For row i, with the target's hidden H_i and the next token t: x = input_proj([hidden_layernorm(H_i);
token_layernorm(embed(t))]), one decoder layer, y = final_layernorm(x). The shared lm_head of y
predicts the token after t; y takes the place of H for the next depth. Names, order and norms as in
vLLM's mimo_mtp, which also sets the embedding of a sequence's first row to zeros: one row of the
head's cache depends on that, and no answer.
"""

from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import mimo
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from .family import Family
from .head import HeadSource, HeadUnusable, HiddenKind

_OWN = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")


class MimoHead(nn.Module):
    """Parameter names are the checkpoint's; those of the decoder layer are in `layer`."""

    hidden_kind: HiddenKind = "post_norm"
    make_cache = KVCache

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.token_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.input_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.final_layernorm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: KVCache) -> mx.array:
        parts = [self.hidden_layernorm(hidden), self.token_layernorm(embedding)]
        x = self.input_proj(mx.concatenate(parts, axis=-1))
        x = cast(Any, self.layer)(x, create_attention_mask(x, cache), cache)
        return self.final_layernorm(x)

    def read_out(self, output: mx.array) -> mx.array:
        return output


class MimoFamily(Family):
    """Grouped-query attention; nothing in it needs a tape."""

    def make_head(self) -> MimoHead:
        args = self._model.args
        return MimoHead(mimo.TransformerBlock(args), args.hidden_size, args.rms_norm_eps)

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array] | HeadUnusable:
        """The checkpoint's tensors as the head's parameters; `load_head` names what lacks."""
        return {
            name if name.startswith(_OWN) else f"layer.{name}": tensor
            for name, tensor in source.tensors.items()
        }
