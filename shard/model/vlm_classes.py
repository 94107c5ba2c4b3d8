"""Classes of models that mlx-lm lacks, made of mlx-vlm's modules.

Each module is imported by itself, as those of towers are: the `__init__` of mlx-vlm's packages
imports all of its drafters and its trainer, and patches transformers.
"""

from collections.abc import Mapping
from typing import Any, Final

from mlx import nn

from ...placement.errors import LoadFailed
from ..checkpoint.model_classes import vlm_type
from ..checkpoint.vision import ADD_CLASSES, has_extra
from ..text.bare_packages import bare_package

_PACKAGES: Final = {
    "qwen4_exp": (
        "models.qwen3_vl",
        "models.qwen3_5",
        "models.qwen3_5_moe",
        "models.qwen4_exp",
        "speculative.ops",
    ),
    "cohere2_moe": ("models.cohere2_moe",),
    "flint": ("models.flint",),
    "k2_horizon": ("models.k2_horizon",),
    "kolibri1": ("models.kolibri1",),
    "step3p7": ("models.qwen3_vl", "models.step3p7"),
}
"""The packages of mlx-vlm that the modules of a class are in."""


def vlm_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type] | None:
    """The class of a model that mlx-lm lacks and that of its arguments, or None for another model.

    Raises LoadFailed without the extra that has its modules, and ImportError.
    """
    name = vlm_type(config)
    if name is None:
        return None
    if not has_extra():
        raise LoadFailed(ADD_CLASSES.format(kind=name))
    for package in _PACKAGES[name]:
        bare_package(f"mlx_vlm.{package}")
    model: Any
    arguments: Any
    match name:
        case "cohere2_moe":
            from mlx_vlm.models.cohere2_moe import cohere2_moe as model
            from mlx_vlm.models.cohere2_moe import config as arguments
        case "flint":
            from mlx_vlm.models.flint import config as arguments
            from mlx_vlm.models.flint import flint as model
        case "k2_horizon":
            from mlx_vlm.models.k2_horizon import config as arguments
            from mlx_vlm.models.k2_horizon import k2_horizon as model
        case "kolibri1":
            from mlx_vlm.models.kolibri1 import config as arguments
            from mlx_vlm.models.kolibri1 import kolibri1 as model
        case "step3p7":
            from mlx_vlm.models.step3p7 import config as arguments
            from mlx_vlm.models.step3p7 import step3p7 as model
        case _:
            from ...mtp.families import qwen4_exp

            return qwen4_exp.Model, qwen4_exp.ModelArgs
    from .vlm_text import text_classes

    return text_classes(model, arguments)
