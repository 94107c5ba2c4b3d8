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
    from ...mtp.families import qwen4_exp as module

    return module.Model, module.ModelArgs
