"""GLM-4.7-Flash: mlx-lm's glm4_moe_lite, with multi-head latent attention.

vLLM sets the embedding of a sequence's first row to zeros in this head, transformers has no such
rule for others of the layout; one row of the head's cache depends on it, and no answer.
"""

from typing import ClassVar

from mlx_lm.models import glm4_moe_lite

from ..caches.rollback import Swaps
from .latent_attention import BlockLatentAttention
from .nextn import NextnFamily


class Glm4MoeLiteBlockAttention(BlockLatentAttention, glm4_moe_lite.Glm4MoeLiteAttention):
    """mlx-lm's attention with `BlockLatentAttention`."""


class Glm4MoeLiteFamily(NextnFamily):
    """The cache holds latents and rotary keys in an ordinary KVCache."""

    layer_class = glm4_moe_lite.Glm4MoeLiteDecoderLayer
    swaps: ClassVar[Swaps] = {glm4_moe_lite.Glm4MoeLiteAttention: Glm4MoeLiteBlockAttention}
    array_mask = True
