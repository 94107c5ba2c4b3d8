"""Whether this environment has what images need: the extra `vision`."""

from importlib.util import find_spec
from typing import Final

LIGHT_WAY: Final = "pip install --no-deps mlx-vlm pillow"
"""Without mlx-vlm's requirements, of which a tower uses none."""
ADD_IMAGES: Final = (
    "this node has no software for images: `pip install 'exo-node[vision]'`, or 667 MB less by "
    f"`{LIGHT_WAY}`, and load the model again"
)


def has_extra() -> bool:
    """Whether mlx-vlm and Pillow are installed; imports neither."""
    return all(find_spec(name) is not None for name in ("mlx_vlm", "PIL"))
