"""LongCat-Flash: mlx-lm's longcat_flash. A layer has two latent attentions, so two caches.

The head is a NextN one with a single attention and a dense MLP, and a final norm of its own. Names,
order and norms as in vLLM's longcat_flash_mtp.
"""

from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models import longcat_flash

from ..caches.rollback import Swaps
from .head import HeadSource
from .latent_attention import BlockLatentAttention
from .nextn import NextnFamily


class LongcatBlockAttention(BlockLatentAttention, longcat_flash.LongcatFlashMLA):
    """mlx-lm's attention with `BlockLatentAttention`; it scales queries and latents."""

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads

    def _queries(self, x: mx.array) -> mx.array:
        return super()._queries(x) * self.mla_scale_q_lora

    def _latent(self, projected: mx.array) -> mx.array:
        return super()._latent(projected) * self.mla_scale_kv_lora


class HeadLayer(nn.Module):
    """The head's decoder layer: a usual one, unlike the backbone's."""

    def __init__(self, args: longcat_flash.ModelArgs) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.self_attn = longcat_flash.LongcatFlashMLA(args)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.mlp = longcat_flash.LongcatFlashMLP(args)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class LongcatFamily(NextnFamily):
    """Its caches hold latents and rotary keys."""

    swaps: ClassVar[Swaps] = {longcat_flash.LongcatFlashMLA: LongcatBlockAttention}
    array_mask = True

    def head_layer(self) -> nn.Module:
        return HeadLayer(self._model.args)

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        """The checkpoint's tensors as the head's parameters.

        The model class splits `kv_b_proj`, so those of the attention are passed under the names of
        one of the backbone's.
        """
        return self._as_in_backbone(source, "self_attn.", "model.layers.0.self_attn.0.")
