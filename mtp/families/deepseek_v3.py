"""DeepSeek-V3 and R1: mlx-lm's deepseek_v3, with multi-head latent attention."""

from typing import ClassVar

from mlx_lm.models import deepseek_v3

from ..caches.rollback import Swaps
from .latent_attention import BlockLatentAttention
from .nextn import NextnFamily


class DeepseekV3BlockAttention(BlockLatentAttention, deepseek_v3.DeepseekV3Attention):
    """mlx-lm's attention with `BlockLatentAttention`."""


class DeepseekV3Family(NextnFamily):
    """The cache holds latents and rotary keys in an ordinary KVCache."""

    layer_class = deepseek_v3.DeepseekV3DecoderLayer
    swaps: ClassVar[Swaps] = {deepseek_v3.DeepseekV3Attention: DeepseekV3BlockAttention}
    array_mask = True
