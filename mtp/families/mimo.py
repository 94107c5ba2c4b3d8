"""MiMo-7B: mlx-lm's mimo, and the one layer of its head, whose matrix takes hidden states first.

Names, order and norms as in vLLM's mimo_mtp, which also sets the embedding of a sequence's first
row to zeros: one row of the head's cache depends on that, and no answer.
"""

from collections.abc import Mapping
from typing import ClassVar

from mlx import nn
from mlx_lm.models import mimo

from .family import Family


class MimoFamily(Family):
    """Grouped-query attention; nothing in it needs a tape."""

    head_names: ClassVar[Mapping[str, str]] = {
        "token_layernorm.": "enorm.",
        "hidden_layernorm.": "hnorm.",
        "input_proj.": "eh_proj.",
        "final_layernorm.": "norm.",
        "": "layer.",
    }
    hidden_first = True

    def head_layer(self) -> nn.Module:
        return mimo.TransformerBlock(self._model.args)
