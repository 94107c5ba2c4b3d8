"""Ernie-4.5: mlx-lm's ernie4_5 and ernie4_5_moe. The head is laid out as NextN's under other names.

x = mtp_linear_proj([mtp_emb_norm(embed(t)); mtp_hidden_norm(H)]), one dense decoder layer, then the
backbone's own final norm and lm_head: so in FastDeploy, the publisher's server, which feeds H after
that norm. vLLM's ernie_mtp leaves the norm after the layer out. mtp_hidden_norm normalises H
again, so a head that was trained before the norm differs little; the card decides.
"""

from collections.abc import Mapping
from typing import ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models import ernie4_5, ernie4_5_moe

from .head import HeadSource
from .nextn import NextnFamily


class ErnieFamily(NextnFamily):
    """Grouped-query attention; nothing in it needs a tape."""

    head_names: ClassVar[Mapping[str, str]] = {
        "mtp_emb_norm.0.": "enorm.",
        "mtp_hidden_norm.0.": "hnorm.",
        "mtp_linear_proj.0.": "eh_proj.",
        "mtp_block.0.": "layer.",
        "": "",
    }

    def head_layer(self) -> nn.Module:
        args = self._model.args
        if isinstance(args, ernie4_5.ModelArgs):
            return ernie4_5.DecoderLayer(args)
        return ernie4_5_moe.Ernie4_5_DecoderLayer(args, len(self._body.layers))

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        return {"norm.weight": self._body.norm.weight, **self.named(source.tensors)}
