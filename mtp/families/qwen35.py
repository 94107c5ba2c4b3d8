"""Qwen3.5 and 3.6, dense and mixture of experts: mlx-lm's qwen3_5 and qwen3_5_moe."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
from mlx_lm.models import qwen3_5

from ..caches.rollback import Swaps
from .head import HiddenKind
from .qwen import QwenFamily
from .taped_gated_delta import TapedGatedDelta


class TapedGatedDeltaNet(TapedGatedDelta, qwen3_5.GatedDeltaNet):
    """mlx-lm's layer with a tape."""

    projections: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        if self.together is not None:
            qkv, z, b, a = self.together(inputs)
        else:
            qkv, z, b, a = (getattr(self, name)(inputs) for name in self.projections)
        return qkv, z.reshape(*z.shape[:2], self.num_v_heads, self.head_v_dim), b, a


class Qwen35Family(QwenFamily):
    """A family that uses the language model of a checkpoint with or without a vision tower."""

    layer_class = qwen3_5.DecoderLayer
    swaps: ClassVar[Swaps] = {qwen3_5.GatedDeltaNet: TapedGatedDeltaNet}

    def __init__(self, model: qwen3_5.Model, hidden_kind: HiddenKind | None = None) -> None:
        super().__init__(model.language_model, hidden_kind)

    def hidden_of(
        self, tokens: mx.array, embeddings: mx.array, caches: Sequence[object]
    ) -> mx.array:
        del tokens
        return self._body(None, cache=caches, input_embeddings=embeddings)
