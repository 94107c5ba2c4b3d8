"""Decoders of mlx-lm as embedders: tensors as their publishers name them, hidden states."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn

from ...mtp.seams import FORWARD_FAULTS
from ...placement.errors import LoadFailed

NO_LM_HEAD: Final[Mapping[str, Any]] = {"tie_word_embeddings": True}
"""Changes to an embedder's config.json. Qwen3-Embedding-8B's says false and its files have no
lm_head, which mlx-lm's class would then want (github.com/vllm-project/vllm-metal, pull request 736,
names the tensors of all three)."""


def embedder_class(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class, reading the tensors of a bare backbone too: Qwen3-Embedding's are published
    without `model.` before their names."""

    class EmbedderModel(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            backbone = {k: v for k, v in weights.items() if not k.startswith("lm_head.")}
            if "embed_tokens.weight" in backbone:
                backbone = {f"model.{name}": value for name, value in backbone.items()}
            stock = getattr(super(), "sanitize", None)
            return backbone if stock is None else stock(backbone)

    return EmbedderModel


class Embedder:
    """A decoder whose hidden states behind its final norm are read; it has no logits."""

    def __init__(self, model: nn.Module, hidden_size: int) -> None:
        """Raises LoadFailed for a class of mlx-lm that does not give them."""
        self._body: Any = getattr(model, "model", None)
        try:
            shape: object = self.hidden(mx.zeros((1, 1), mx.int32), None).shape
        except FORWARD_FAULTS as fault:
            shape = type(fault).__name__
        if shape != (1, 1, hidden_size):
            raise LoadFailed(
                f"{type(model).__module__} gives {shape} where hidden states of {hidden_size} "
                'numbers are, so it cannot embed; remove "embeddings" from the capabilities of its '
                "card"
            )

    def hidden(self, tokens: mx.array, caches: Sequence[object] | None) -> mx.array:
        """Appends ids (B, n) to the caches -> (B, n, H); None: there are no caches."""
        return cast("mx.array", self._body(tokens, cache=caches))

    def logits(self, hidden: mx.array) -> mx.array:
        """The hidden states themselves: nothing reads them as logits."""
        return hidden
