"""How a model reads images, by its config.json, and what images and encoders need: the extra
`vision`, and a tower's tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any, Final, Literal, cast

from ...placement.errors import InvalidCheckpoint
from .checkpoint import read_config, text_config

Facts = Mapping[str, Any]
MAX_IMAGE_ROWS: Final = 512
"""Rows of an image that one forward must read at once: those of the longest usual forward."""
_MAX_SIZE: Final = 1 << 20
_MAX_DEPTH: Final = 256
TOWER_PREFIXES: Final = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Beginnings of a tower's names: as published, in older conversions, and in mlx-vlm's."""
LIGHT_WAY: Final = "pip install --no-deps 'mlx-vlm<0.8' pillow"
"""Without mlx-vlm's requirements, of which a tower uses none."""
_ADD: Final = (
    "this node has no software for {}: `pip install 'exo-node[vision]'`, or 667 MB less by "
    f"`{LIGHT_WAY}`, and load the model again"
)
ADD_IMAGES: Final = _ADD.format("images")
ADD_ENCODERS: Final = _ADD.format("encoders")
ADD_CLASSES: Final = _ADD.format("models of the type {kind}")
ADD_DRAFTERS: Final = _ADD.format("block drafters")


@dataclass(frozen=True, slots=True)
class Vision:
    """How a model reads images."""

    kind: Literal["qwen", "gemma", "mistral"]
    """The kind of its tower."""
    tower: Facts
    placeholder: int
    """The id that stands for an image in a rendered prompt."""
    merge: int
    """Patches of a row's side."""
    section: tuple[int, ...] = ()
    """See `RopePositions`; empty if positions of image rows are their numbers."""
    deep: int = 0
    """The model's first layers whose outputs get features added: deepstack."""
    image_rows: int = 0
    """Rows of each image, which see all of each other, so that no forward ends within one; 0: rows
    see those in front of them, and their number follows from the image's size."""
    frame: tuple[int, int] | None = None
    """The ids around the rows of an image, of which a template writes only the first."""

    def rows(self, grid: tuple[int, ...]) -> int:
        """Rows of an image with `grid` patches by time, height and width."""
        time, height, width = (grid[0], *(side // self.merge for side in grid[1:]))
        return time * height * (width + self.ends_lines)

    @property
    def ends_lines(self) -> bool:
        """Whether a row that is no patch's ends each line of an image."""
        return self.kind == "mistral"


def vision_of(config: Facts) -> Vision | None:
    """How the model reads images, or None if it reads none that this engine knows."""
    tower: Any = config.get("vision_config")
    read = _FAMILIES.get(str(config.get("model_type")))
    return read(config, cast("Facts", tower)) if read and isinstance(tower, dict) else None


def _qwen(config: Facts, tower: Facts) -> Vision | None:
    text = text_config(config)
    rope: Any = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section: Any = rope.get("mrope_section") if isinstance(rope, dict) else None
    placeholder, merge = config.get("image_token_id"), tower.get("spatial_merge_size", 2)
    if not _are_sizes(section, 3) or not _are_sizes([placeholder, merge], 2):
        return None
    deep: Any = tower.get("deepstack_visual_indexes") or []
    if not isinstance(deep, list) or len(cast("list[Any]", deep)) > _MAX_DEPTH:
        return None
    count = len(cast("list[Any]", deep))
    return Vision("qwen", tower, cast(int, placeholder), merge, tuple(section), count)


def _flash_next(config: Facts, tower: Facts) -> Vision | None:
    """Qwen3.8-Flash-Next, whose streams take no features after layers."""
    vision = _qwen(config, tower)
    return None if vision is None or vision.deep else vision


def _gemma(config: Facts, tower: Facts) -> Vision | None:
    names = ("image_token_index", "boi_token_index", "eoi_token_index")
    ids = [config.get(name, config.get(name.replace("index", "id"))) for name in names]
    rows = config.get("mm_tokens_per_image", 256)
    sizes = [tower.get("image_size"), tower.get("patch_size"), rows]
    if not _are_sizes(ids, 3) or not _are_sizes(sizes, 3) or rows > MAX_IMAGE_ROWS:
        return None
    patches, side = tower["image_size"] // tower["patch_size"], isqrt(rows)
    if side**2 != rows or not patches or patches % side:
        return None
    placeholder, *frame = cast("list[int]", ids)
    merge = patches // side
    return Vision("gemma", tower, placeholder, merge, image_rows=rows, frame=(frame[0], frame[1]))


def _mistral(config: Facts, tower: Facts) -> Vision | None:
    placeholder = config.get("image_token_index", config.get("image_token_id", 10))
    merge = config.get("spatial_merge_size", 2)
    sizes = [placeholder, merge, tower.get("image_size"), tower.get("patch_size")]
    is_usual = (
        tower.get("hidden_act") == "silu"
        and config.get("projector_hidden_act", "gelu") == "gelu"
        and config.get("vision_feature_layer", -1) == -1
    )
    return (
        Vision("mistral", tower, placeholder, merge) if _are_sizes(sizes, 4) and is_usual else None
    )


_FAMILIES: Final[Mapping[str, Callable[[Facts, Facts], Vision | None]]] = {
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen4_exp": _flash_next,
    "gemma3": _gemma,
    "mistral3": _mistral,
}


def is_sound(tower: Facts) -> bool:
    """Whether the sizes in a `vision_config` may be those of a tower."""
    sizes = [value for value in tower.values() if isinstance(value, (int, float))]
    depth: Any = tower.get("depth", tower.get("num_hidden_layers"))
    return type(depth) is int and 0 < depth <= _MAX_DEPTH and all(abs(s) < _MAX_SIZE for s in sizes)


def _are_sizes(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(cast("list[Any]", values)) == count
        and all(type(each) is int and 0 < each < _MAX_SIZE for each in cast("list[Any]", values))
    )


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
