"""The draft head of DeepSeek-V3 and GLM-4.x-MoE: one layer more than the backbone has.

For row i, with the target's hidden H_i and the next token t: x = eh_proj([enorm(embed(t));
hnorm(H_i)]), one decoder layer of the family. The shared lm_head of shared_head.norm(x) predicts
the token after t. The order of the concatenation is that of transformers' MtpModel, vLLM's
deepseek_mtp and SGLang's glm4_moe_nextn. Publishers repeat lm_head and embeddings in the head, as
`shared_head.head` and `embed_tokens`; these copies are not loaded.

Which hidden is fed, and so which output takes its place for the next depth, is not agreed on.
transformers and SGLang take both after their norms. vLLM takes the first after, and changed the
second from before to after (its pull request 47448); llama.cpp's 24025 says before. hnorm
normalises again, so only the weights of the norm between make a difference: no test can say which
a checkpoint was trained with, but its acceptance can. The card decides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..caches.rollback import RowCache, parts_of, swap_classes
from .family import Family
from .head import HeadSource, HeadUnusable, HiddenKind

_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")


class SharedHead(nn.Module):
    """`shared_head` of the checkpoint without its copy of the lm_head."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps)


class NextnHead(nn.Module):
    """The head of NextN checkpoints. Parameter names are the checkpoint's after the layer's
    number; those of the decoder layer are in `layer`."""

    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        eps: float,
        hidden_kind: HiddenKind,
        make_cache: Callable[[], RowCache],
        *,
        array_mask: bool,
        window: int | None,
    ) -> None:
        """`layer` takes (x, mask, cache), and attends to `window` rows, or to all.

        `array_mask`: its mask has to be an array.
        """
        super().__init__()
        self.enorm = nn.RMSNorm(hidden_size, eps=eps)
        self.hnorm = nn.RMSNorm(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.shared_head = SharedHead(hidden_size, eps)
        self.hidden_kind: HiddenKind = hidden_kind
        self.make_cache = make_cache
        self._window = window
        self._array_mask = array_mask

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: RowCache) -> mx.array:
        dtype = self.enorm.weight.dtype  # float32 on CPUs for unquantised experts
        e, h = embedding.astype(dtype), hidden.astype(dtype)
        x = self.eh_proj(mx.concatenate([self.enorm(e), self.hnorm(h)], axis=-1))
        mask = create_attention_mask(
            x, parts_of(cache)[0], window_size=self._window, return_array=self._array_mask
        )
        x = cast(Any, self.layer)(x, mask, cache)
        if self.hidden_kind == "post_norm":
            x = self.shared_head.norm(x)
        return x.astype(hidden.dtype)

    def read_out(self, output: mx.array) -> mx.array:
        return output if self.hidden_kind == "post_norm" else self.shared_head.norm(output)


class NextnFamily(Family):
    """A backbone with such a head; a subclass for each family names its decoder layer."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("post_norm", "pre_norm")
    array_mask: ClassVar[bool] = False
    """Whether the family's layers need masks as arrays."""
    layer_class: ClassVar[type[nn.Module]]
    """The class of a decoder layer, made of the model's arguments and an index."""

    def make_cache(self) -> RowCache:
        """The cache of one layer, without rows."""
        return KVCache()

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        if self.hidden_kind == "post_norm":
            return super().hidden(tokens, caches)
        x = self._body.embed_tokens(tokens)
        mask = create_attention_mask(x, parts_of(caches[0])[0], return_array=self.array_mask)
        for layer, cache in zip(self._body.layers, caches, strict=True):
            x = layer(x, mask, cache)
        return x

    def make_head(self) -> Any:
        layer = cast("Any", self.layer_class)(self._model.args, len(self._body.layers))
        return self.head_of(layer, self._model.args.rms_norm_eps)

    def head_of(self, layer: nn.Module, eps: float, window: int | None = None) -> NextnHead:
        """A head with a decoder layer, which attends to `window` rows, or to all."""
        swap_classes(layer, self.swaps)
        return NextnHead(
            layer,
            self._model.args.hidden_size,
            eps,
            self.hidden_kind,
            self.make_cache,
            array_mask=self.array_mask,
            window=window,
        )

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array] | HeadUnusable:
        """The checkpoint's tensors as the head's parameters.

        The model class stacks experts, splits projections and dequantises, so the head's tensors
        are passed under the names of the backbone's last layer.
        """
        prefix = f"model.layers.{self._model.args.num_hidden_layers - 1}."
        return self._as_in_backbone(source, "", prefix)

    def _as_in_backbone(
        self, source: HeadSource, ours: str, prefix: str
    ) -> dict[str, mx.array] | HeadUnusable:
        """The parameters, where those that begin with `ours` are passed to the model class under
        the backbone's `prefix` in its place."""
        named = {
            prefix + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in source.tensors.items()
        }
        try:
            clean: Mapping[str, mx.array] = self._model.sanitize(named)
        except KeyError as missing:
            name = str(missing.args[0]).replace(prefix, ours)
            return HeadUnusable(
                f"the MTP head lacks {name}; use the original repository's checkpoint"
            )
        except ValueError as fault:
            return HeadUnusable(
                f"the MTP head's tensors do not fit together ({fault}); use the original "
                "repository's checkpoint"
            )
        return dict(placed(name.replace(prefix, ours), value) for name, value in clean.items())


def placed(name: str, value: mx.array) -> tuple[str, mx.array]:
    """A parameter under its name in a `NextnHead`."""
    return (name if name.startswith(_OWN) else f"layer.{name}"), value
