"""GLM-4.7-Flash: mlx-lm's glm4_moe_lite, with multi-head latent attention.

vLLM sets the embedding of a sequence's first row to zeros in this head, transformers has no such
rule for others of the layout; one row of the head's cache depends on it, and no answer.
"""

from typing import ClassVar

from mlx import nn
from mlx_lm.models import glm4_moe_lite

from .latent_attention import BlockLatentAttention
from .nextn import NextnFamily
from .rollback import Swaps


class BlockAttention(BlockLatentAttention, glm4_moe_lite.Glm4MoeLiteAttention):
    """mlx-lm's attention with `BlockLatentAttention`."""


class Glm4MoeLiteFamily(NextnFamily):
    """The cache holds latents and rotary keys in an ordinary KVCache."""

    swaps: ClassVar[Swaps] = {glm4_moe_lite.Glm4MoeLiteAttention: BlockAttention}
    array_mask = True

    def make_layer(self, index: int) -> nn.Module:
        layer = glm4_moe_lite.Glm4MoeLiteDecoderLayer(self._model.args, index)
        layer.self_attn.__class__ = BlockAttention
        return layer
