"""Ernie-4.5: mlx-lm's ernie4_5 and ernie4_5_moe. The head is laid out as NextN's under other names.

x = mtp_linear_proj([mtp_emb_norm(embed(t)); mtp_hidden_norm(H)]), one dense decoder layer, then the
backbone's own final norm and lm_head: so in FastDeploy, the publisher's server, which feeds H after
that norm. vLLM's ernie_mtp leaves the norm after the layer out. mtp_hidden_norm normalises H
again, so a head that was trained before the norm differs little; the card decides.
"""

from collections.abc import Mapping
from typing import Final

import mlx.core as mx
from mlx_lm.models import ernie4_5, ernie4_5_moe

from .head import HeadSource, HeadUnusable
from .nextn import NextnFamily, NextnHead

_NAMES: Final[Mapping[str, str]] = {
    "mtp_emb_norm.0.": "enorm.",
    "mtp_hidden_norm.0.": "hnorm.",
    "mtp_linear_proj.0.": "eh_proj.",
    "mtp_block.0.": "layer.",
}
"""Beginnings of the checkpoint's names, and what the head calls them."""


class ErnieFamily(NextnFamily):
    """Grouped-query attention; nothing in it needs a tape."""

    def make_head(self) -> NextnHead:
        args = self._model.args
        if isinstance(args, ernie4_5.ModelArgs):
            layer = ernie4_5.DecoderLayer(args)
        else:
            layer = ernie4_5_moe.Ernie4_5_DecoderLayer(args, len(self._body.layers))
        return self.head_of(layer, args.rms_norm_eps)

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array] | HeadUnusable:
        """The checkpoint's tensors as the head's parameters; `load_head` names what lacks."""
        named = {"shared_head.norm.weight": self._body.norm.weight}
        for name, tensor in source.tensors.items():
            stem = next((stem for stem in _NAMES if name.startswith(stem)), "")
            named[_NAMES.get(stem, "") + name.removeprefix(stem)] = tensor
        return named
