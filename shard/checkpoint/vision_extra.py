"""Requirements of images and encoders: the extra `vision`, and a tower's tensors."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidCheckpoint
from .checkpoint import read_config
from .vision import vision_of

TOWER_PREFIXES: Final = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Beginnings of a tower's names: as published, in older conversions, and in mlx-vlm's."""
LIGHT_WAY: Final = "pip install --no-deps mlx-vlm pillow"
"""Without mlx-vlm's requirements, of which a tower uses none."""
_ADD: Final = (
    "this node has no software for {}: `pip install 'exo-node[vision]'`, or 667 MB less by "
    f"`{LIGHT_WAY}`, and load the model again"
)
ADD_IMAGES: Final = _ADD.format("images")
ADD_ENCODERS: Final = _ADD.format("encoders")


def may_read_images(folder: Path) -> bool:
    """Whether a checkpoint is expected to read images on this machine, by its config.json."""
    try:
        config = read_config(folder)
    except InvalidCheckpoint:  # a load of the model names the file and the fault
        return False
    return vision_of(config) is not None and has_extra()


def has_extra() -> bool:
    """Whether mlx-vlm and Pillow are installed; imports neither."""
    return all(find_spec(name) is not None for name in ("mlx_vlm", "PIL"))
