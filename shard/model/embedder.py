"""Models as embedders: tensors as their publishers name them, hidden states, pooling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn

from ...mtp.seams import FORWARD_FAULTS
from ...placement.errors import LoadFailed
from .encoder import encoder_states

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


POOLINGS: Final[Mapping[str, Callable[[mx.array], mx.array]]] = {
    "last": lambda hidden: hidden[0, -1].astype(mx.float32),
    "cls": lambda hidden: hidden[0, 0].astype(mx.float32),
    "mean": lambda hidden: hidden[0].astype(mx.float32).mean(axis=0),
}
"""Hidden states (1, n, H) of a text -> (H,) in float32."""


class Embedder:
    """A model whose hidden states behind its final norm are read; it has no logits."""

    def __init__(self, model: nn.Module, hidden_size: int) -> None:
        """Raises LoadFailed for a class that does not give them."""
        self._encode = encoder_states(model)
        self.is_encoder = self._encode is not None
        """Whether it reads a text in one forward, and has no caches."""
        self._body: Any = getattr(model, "model", None)
        try:
            shape: object = self.hidden(mx.zeros((1, 1), mx.int32), None).shape
        except FORWARD_FAULTS as fault:
            shape = type(fault).__name__
        if shape != (1, 1, hidden_size):
            remedy = 'remove "embeddings" from the capabilities of its card'
            if self.is_encoder:
                remedy = "take the publisher's config.json"
            raise LoadFailed(
                f"{type(model).__module__} gives {shape} where hidden states of {hidden_size} "
                f"numbers are, so it cannot embed; {remedy}"
            )

    def hidden(self, tokens: mx.array, caches: Sequence[object] | None) -> mx.array:
        """Appends ids (B, n) to the caches -> (B, n, H); None: there are no caches."""
        if self._encode is not None:
            return self._encode(tokens)
        return cast("mx.array", self._body(tokens, cache=caches))

    def logits(self, hidden: mx.array) -> mx.array:
        """The hidden states themselves: nothing reads them as logits."""
        return hidden
