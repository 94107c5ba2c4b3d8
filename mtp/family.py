"""What the engine needs of a model family to verify drafts; one class here for each family."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_5

from .head import MtpHead


class Family(Protocol):
    """A loaded model taken apart where multi-token prediction needs it."""

    hidden_kind: str
    """"post_norm" or "pre_norm": which hidden `hidden` gives, and so what the head is fed."""

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Ids (1, n) -> (1, n, H), appended to the caches; no logits are computed."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """(1, n, H) of `hidden`'s or of the head's output -> (1, n, V)."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids (1, n) -> (1, n, H)."""
        ...

    def make_head(self) -> MtpHead:
        """A head of this family's shape, weights not yet loaded."""
        ...


class Qwen35Family:
    """Qwen3.5 and 3.6, dense and mixture of experts (mlx-lm's qwen3_5 and qwen3_5_moe)."""

    hidden_kind = "post_norm"

    def __init__(self, model: qwen3_5.Model) -> None:
        self._text = model.language_model
        self._body = model.language_model.model

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        return self._body(tokens, cache=caches)

    def logits(self, hidden: mx.array) -> mx.array:
        if self._text.args.tie_word_embeddings:
            return self._body.embed_tokens.as_linear(hidden)
        return self._text.lm_head(hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        return self._body.embed_tokens(tokens)

    def make_head(self) -> MtpHead:
        args = self._text.args
        # The index of a layer that is_linear calls full attention: the head has no recurrence.
        layer = qwen3_5.DecoderLayer(args, layer_idx=args.full_attention_interval - 1)
        return MtpHead(layer, args.hidden_size, args.rms_norm_eps)


def family_of(model: nn.Module) -> Family | None:
    """The family whose interface fits a loaded mlx-lm model, None where no class here does."""
    if isinstance(model, qwen3_5.Model):
        return Qwen35Family(model)
    return None
