"""Models as embedders: tensors as their publishers name them, hidden states, pooling. Encoders are
mlx-vlm's: a text's hidden states, alone or in a padded batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn

from ...mtp.seams import FORWARD_FAULTS
from ...placement.errors import LoadFailed
from ..checkpoint.embedders import encoder_family
from ..text.bare_packages import bare_package

NO_LM_HEAD: Final[Mapping[str, Any]] = {"tie_word_embeddings": True}
"""Changes to an embedder's config.json. Qwen3-Embedding-8B's says false and its files have no
lm_head, which mlx-lm's class would then want (github.com/vllm-project/vllm-metal, pull request 736,
names the tensors of all three)."""


def with_backbone_names(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The tensors as mlx-lm's class names them: Qwen3-Embedding's are published without `model.`
    before their names. There is no lm_head."""
    backbone = {k: v for k, v in weights.items() if not k.startswith("lm_head.")}
    if "embed_tokens.weight" in backbone:
        return {f"model.{name}": value for name, value in backbone.items()}
    return backbone


POOLINGS: Final[Mapping[str, Callable[[mx.array], mx.array]]] = {
    "last": lambda hidden: hidden[0, -1].astype(mx.float32),
    "cls": lambda hidden: hidden[0, 0].astype(mx.float32),
    "mean": lambda hidden: hidden[0].astype(mx.float32).mean(axis=0),
}
"""Hidden states (1, n, H) of a text -> (H,) in float32."""


PADDING: Final = -1
"""The id of rows after the end of an input in a batch."""
_MOST_SCORES: Final = 1 << 24
"""Limit of the scores of all heads that attention keeps at once, where it is not fused."""
_PACKAGE: Final = "mlx_vlm.models."


class Embedder:
    """A model whose hidden states after its final norm are read; it has no logits."""

    def __init__(self, model: nn.Module, hidden_size: int) -> None:
        """Tries the model on one row. Raises LoadFailed if its class gives no hidden states."""
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
        """Appends ids (B, n) to the caches -> (B, n, H). An encoder has none."""
        if self._encode is not None:
            return self._encode(tokens)
        return cast("mx.array", self._body(tokens, cache=caches))

    def logits(self, hidden: mx.array) -> mx.array:
        """The hidden states themselves: nothing reads them as logits."""
        return hidden


@dataclass(frozen=True, slots=True)
class _Mask:
    """The rows that attention sees; the class passes it on without reading it."""

    is_text: mx.array | None
    """(B, n), or None if no row is padding."""
    window: int = 0
    """Rows on either side, or 0 for all."""

    def part(self, start: int, end: int, first: int, last: int) -> mx.array | None:
        """The mask of queries [start, end) and keys [first, last) for all heads, or None if it
        hides no key."""
        queries, keys = mx.arange(start, end)[:, None], mx.arange(first, last)
        visible = None if self.is_text is None else self.is_text[:, None, first:last]
        if self.window:
            near = mx.abs(queries - keys) <= self.window
            visible = near[None] if visible is None else near & visible
        if visible is None:
            return None
        # A row of padding sees itself: no row may see none.
        return (visible | (queries == keys))[:, None]


def encoder_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type]:
    """The class of an encoder and that of its config. Raises ImportError."""
    family = encoder_family(config)
    bare_package(f"mlx_vlm.models.{family}")
    module: Any
    match family:
        case "bert":
            from mlx_vlm.models.bert import bert as module
            from mlx_vlm.models.bert.config import ModelConfig
        case "modernbert":
            from mlx_vlm.models.modernbert import modernbert as module
            from mlx_vlm.models.modernbert.config import ModelConfig
        case _:
            from mlx_vlm.models.xlm_roberta import xlm_roberta as module
            from mlx_vlm.models.xlm_roberta.config import ModelConfig
    module.scaled_dot_product_attention = _attention
    return module.Model, ModelConfig


def encoder_states(model: nn.Module) -> Callable[[mx.array], mx.array] | None:
    """Hidden states (B, n, H) of ids (B, n) with PADDING after them, or None for no encoder."""
    name = type(model).__module__
    if not name.startswith(_PACKAGE):
        return None
    stack = _modernbert if name.endswith(".modernbert") else _bert
    body: Any = model
    for layer in body.layers if stack is _modernbert else ():
        layer.mlp.act = nn.GELU()  # mlx-vlm approximates it, and is 0.002 off

    def states(tokens: mx.array) -> mx.array:
        is_text = tokens != PADDING
        # XLM-R has no position for this id, and counts the others.
        padding = getattr(body.embeddings, "padding_idx", 0)
        rows = mx.where(is_text, tokens, padding)
        return stack(body, rows, is_text if tokens.shape[0] > 1 else None)

    return states


def _bert(body: Any, rows: mx.array, is_text: mx.array | None) -> mx.array:
    return body.encoder(body.embeddings(rows), _Mask(is_text))


def _modernbert(body: Any, rows: mx.array, is_text: mx.array | None) -> mx.array:
    x = body.embeddings(rows)
    whole, near = _Mask(is_text), _Mask(is_text, body.local_attention // 2)
    for layer in body.layers:
        x = layer(x, whole, near)
    return body.final_norm(x)


def _attention(
    q: mx.array, k: mx.array, v: mx.array, _cache: object, scale: float, mask: _Mask | mx.array
) -> mx.array:
    """In place of mlx-vlm's in its encoders: a few queries at a time, so that neither scores nor
    masks grow with the square of a long input.

    `mask`: an array where the class calls itself, as it does while its layers are timed.
    """
    if not isinstance(mask, _Mask):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    batch, heads, count, _ = q.shape
    keys = min(count, 4 * mask.window) if mask.window else count
    rows = max(1, min(2 * mask.window or count, _MOST_SCORES // (batch * heads * keys)))
    parts: list[mx.array] = []
    for start in range(0, count, rows):
        end = min(start + rows, count)
        first, last = 0, count
        if mask.window:
            first, last = max(0, start - mask.window), min(count, end + mask.window)
        parts.append(
            mx.fast.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, first:last],
                v[:, :, first:last],
                scale=scale,
                mask=mask.part(start, end, first, last),
            )
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
