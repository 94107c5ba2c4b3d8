"""DeepSeek-V3 and R1: mlx-lm's deepseek_v3, with multi-head latent attention."""

from typing import ClassVar

from mlx import nn
from mlx_lm.models import deepseek_v3

from .latent_attention import BlockLatentAttention
from .nextn import NextnFamily
from .rollback import Swaps


class BlockAttention(BlockLatentAttention, deepseek_v3.DeepseekV3Attention):
    """mlx-lm's attention with `BlockLatentAttention`."""


class DeepseekV3Family(NextnFamily):
    """The cache holds latents and rotary keys in an ordinary KVCache."""

    swaps: ClassVar[Swaps] = {deepseek_v3.DeepseekV3Attention: BlockAttention}
    array_mask = True

    def make_layer(self, index: int) -> nn.Module:
        layer = deepseek_v3.DeepseekV3DecoderLayer(self._model.args, index)
        layer.self_attn.__class__ = BlockAttention
        return layer
