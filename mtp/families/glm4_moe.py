"""GLM-4.5 to 4.7, mixture of experts: mlx-lm's glm4_moe."""

from mlx_lm.models import glm4_moe

from .nextn import NextnFamily


class Glm4MoeFamily(NextnFamily):
    """Grouped-query attention; nothing in it needs a tape."""

    layer_class = glm4_moe.DecoderLayer
