"""Qwen3-Next: mlx-lm's qwen3_next."""

from typing import ClassVar

import mlx.core as mx
from mlx_lm.models import qwen3_next

from ..caches.rollback import Swaps
from .qwen import QwenFamily
from .taped_gated_delta import TapedGatedDelta


class TapedQwen3NextGatedDeltaNet(TapedGatedDelta, qwen3_next.Qwen3NextGatedDeltaNet):
    """mlx-lm's layer with a tape; its projections are interleaved by key head."""

    projections: ClassVar[tuple[str, ...]] = ("in_proj_qkvz", "in_proj_ba")

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        if self.together is not None:
            qkvz, ba = self.together(inputs)
        else:
            qkvz, ba = self.in_proj_qkvz(inputs), self.in_proj_ba(inputs)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        flat = [part.reshape(*inputs.shape[:2], -1) for part in (q, k, v)]
        return mx.concatenate(flat, axis=-1), z, b, a


class Qwen3NextFamily(QwenFamily):
    """A family whose whole model is the text model."""

    layer_class = qwen3_next.Qwen3NextDecoderLayer
    swaps: ClassVar[Swaps] = {qwen3_next.Qwen3NextGatedDeltaNet: TapedQwen3NextGatedDeltaNet}
