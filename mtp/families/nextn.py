"""The families of NextN heads, as of DeepSeek-V3 and GLM-4.x-MoE: one layer more than the backbone
has. GLM-4.5 to 4.7 (mlx-lm's glm4_moe) need no more than this.

Publishers repeat lm_head and embeddings in the head, as `shared_head.head` and `embed_tokens`;
these copies are not loaded.

Which hidden is fed, and so which output takes its place for the next depth, is not agreed on.
transformers and SGLang take both after their norms. vLLM takes the first after, and changed the
second from before to after (its pull request 47448); llama.cpp's 24025 says before. hnorm
normalises again, so only the weights of the norm between make a difference: no test can say which
a checkpoint was trained with, but its acceptance can. The card decides.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask

from ..caches.rollback import parts_of
from .family import Family
from .head import HeadSource, HeadUnusable, HiddenKind


class NextnFamily(Family):
    """A backbone with such a head, whose layer is as the backbone's last one."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("post_norm", "pre_norm")

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        if self.hidden_kind == "post_norm":
            return super().hidden(tokens, caches)
        x = self._body.embed_tokens(tokens)
        mask = create_attention_mask(x, parts_of(caches[0])[0], return_array=self.array_mask)
        for layer, cache in zip(self._body.layers, caches, strict=True):
            x = layer(x, mask, cache)
        return x

    def head_layer(self) -> nn.Module:
        layers: list[Any] = self._body.layers
        return type(layers[-1])(self._model.args, len(layers))

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        """The checkpoint's tensors as the head's parameters.

        The model class stacks experts, splits projections and dequantises, so the head's tensors
        are passed under the names of the backbone's last layer.
        """
        prefix = f"model.layers.{self._model.args.num_hidden_layers - 1}."
        return self._as_in_backbone(source, "", prefix)

    def _as_in_backbone(self, source: HeadSource, ours: str, prefix: str) -> dict[str, mx.array]:
        """The parameters, where those that begin with `ours` are passed to the model class under
        the backbone's `prefix` in its place. Raises HeadUnusable."""
        named = {
            prefix + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in source.tensors.items()
        }
        try:
            clean: dict[str, mx.array] = self._model.sanitize(named)
        except KeyError as missing:
            name = str(missing.args[0]).replace(prefix, ours)
            raise HeadUnusable(
                f"the MTP head lacks {name}; use the original repository's checkpoint"
            ) from missing
        return self.named({name.replace(prefix, ours): value for name, value in clean.items()})
