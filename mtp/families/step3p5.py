"""Step-3.5-Flash: mlx-lm's step3p5, and the first of the layers of its head.

`model.layers.{num_hidden_layers}`: a NextN head whose layer is dense. Names, order and norms as in
vLLM's step3p5_mtp, which reads H before the final norm. Of what the further layers read the sources
differ, see `mimo_v2`; deeper drafts come from the first one's own output.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models import step3p5
from mlx_lm.models.base import create_attention_mask

from .head import DraftHead, HeadSource, HiddenKind
from .nextn import NextnFamily

_RAW_NORM = "transformer.shared_head."
"""The publisher's name, whose checkpoint stores norms as w - 1."""


class StepFamily(NextnFamily):
    """Grouped-query attention with windows; nothing in it needs a tape."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("pre_norm", "post_norm")

    def hidden(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        body = self._body
        if self.hidden_kind == "post_norm":
            return body(tokens, caches)
        x, masks = body.embed_tokens(tokens), dict[bool, Any]()
        for layer, cache in zip(body.layers, caches, strict=True):
            if layer.is_sliding not in masks:
                window = body.args.sliding_window if layer.is_sliding else None
                masks[layer.is_sliding] = create_attention_mask(x, cache, window_size=window)
            x = layer(x, mask=masks[layer.is_sliding], cache=cache)
        return x

    def make_head(self) -> DraftHead:
        args: step3p5.ModelArgs = self._model.args
        kinds, index = args.layer_types or [], args.num_hidden_layers
        if kinds and len(kinds) <= index:  # the list need not have the head's layers
            args = replace(args, layer_types=[*kinds, *["sliding_attention"] * (index + 1)])
        layer = step3p5.Step3p5DecoderLayer(args, index)
        window = args.sliding_window if layer.is_sliding else None
        return self.head_of(layer, args.rms_norm_eps, window)

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        shift = 1 if any(name.startswith(_RAW_NORM) for name in source.tensors) else 0
        tensors = {
            name.removeprefix("transformer."): tensor + shift * name.endswith("norm.weight")
            for name, tensor in source.tensors.items()
        }
        return self.named(tensors)
