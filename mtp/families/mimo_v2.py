"""MiMo-V2-Flash: mlx-lm's mimo_v2_flash, and the first of the layers of its head.

`model.mtp.layers.0`: a NextN head whose layer has a sliding window and a dense MLP. What the
further layers read is not published, and other engines differ: exllamav3 gives them the target's
hidden state again, SGLang the output of the layer before. mlx-vlm uses the first one alone, too.
Deeper drafts come from its own output.
"""

from typing import ClassVar

from mlx_lm.models import mimo_v2_flash

from .head import DraftHead, HiddenKind
from .nextn import NextnFamily


class MimoV2Family(NextnFamily):
    """Grouped-query attention with windows; nothing in it needs a tape."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("post_norm",)

    def make_head(self) -> DraftHead:
        args = self._model.args
        layer = mimo_v2_flash.DecoderLayer(args, is_moe=False, is_sliding_window=True)
        return self.head_of(layer, args.layernorm_epsilon, args.sliding_window_size)
