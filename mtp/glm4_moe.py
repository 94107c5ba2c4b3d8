"""GLM-4.5 to 4.7, mixture of experts: mlx-lm's glm4_moe."""

from mlx import nn
from mlx_lm.models import glm4_moe

from .nextn import NextnFamily


class Glm4MoeFamily(NextnFamily):
    """Grouped-query attention; nothing in it needs a tape."""

    def make_layer(self, index: int) -> nn.Module:
        return glm4_moe.DecoderLayer(self._model.args, index)
