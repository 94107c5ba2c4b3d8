"""The vision tower beside a text model: mlx-vlm's module, filled from the same checkpoint."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
from mlx import nn

from ...mtp.placed_rope import RopePositions, deepen, place_ropes
from ...mtp.seams import FORWARD_FAULTS
from ...mtp.weights import cast_parameters
from ...placement.errors import InvalidRequest
from ..checkpoint.checkpoint import Checkpoint, text_config
from ..checkpoint.vision_extra import ADD_IMAGES, TOWER_PREFIXES, TOWER_TYPES, has_extra
from ..text.image_rows import PreparedImage
from .stage_model import headline, parameters_of

_MAX_SIZE: Final = 1 << 20
_MAX_DEPTH: Final = 256


@dataclass(frozen=True, slots=True)
class Vision:
    """The facts of config.json about images."""

    placeholder: int
    """The id that stands for an image in a rendered prompt."""
    merge: int
    """Patches of a row's side."""
    section: tuple[int, ...]
    """See `RopePositions`."""
    tower: Mapping[str, Any]
    deep: int
    """The model's first layers whose outputs get features added: deepstack."""


class Features(NamedTuple):
    """A tower's output for an image; lazy."""

    rows: mx.array
    """(rows, H), in place of embeddings."""
    deep: Sequence[mx.array]
    """(rows, H) for each of the model's first layers; see `RopePositions.deep`."""
    steps: Sequence[mx.array]
    """Outputs of the tower's layers on the way, by which it can be computed in parts."""


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """None: the model reads text only, or its images are none that this engine knows."""
    tower: Any = config.get("vision_config")
    if config.get("model_type") not in TOWER_TYPES or not isinstance(tower, dict):
        return None
    text = text_config(config)
    rope: Any = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section: Any = rope.get("mrope_section") if isinstance(rope, dict) else None
    tower = cast("dict[str, Any]", tower)
    placeholder, merge = config.get("image_token_id"), tower.get("spatial_merge_size", 2)
    if not _are_sizes(section, 3) or not _are_sizes([placeholder, merge], 2):
        return None
    deep: Any = tower.get("deepstack_visual_indexes") or []
    if not isinstance(deep, list) or len(cast("list[Any]", deep)) > _MAX_DEPTH:
        return None
    count = len(cast("list[Any]", deep))
    return Vision(cast(int, placeholder), merge, tuple(section), tower, count)


def _are_sizes(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(cast("list[Any]", values)) == count
        and all(type(each) is int and 0 < each < _MAX_SIZE for each in cast("list[Any]", values))
    )


def placed_positions(model: nn.Module, vision: Vision | None) -> RopePositions:
    """The positions that the ropes of `model` take from now on: those of text where it reads no
    images, and until somebody sets others."""
    positions = RopePositions(vision.section if vision is not None else ())
    place_ropes(model, positions)
    if vision is not None:
        deepen(cast(Any, model).layers[: vision.deep], positions)
    return positions


def embedding_of(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """Ids (1, n) -> (1, n, H) of a model with a tower."""
    return cast(Any, model).language_model.model.embed_tokens


class Tower:
    """A vision tower in memory. All methods run on the compute thread."""

    def __init__(self, module: Any, vision: Vision) -> None:
        self._module = module
        self.vision = vision

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(p.nbytes for p in parameters_of(self._module))

    def features(self, image: PreparedImage) -> Features:
        """Raises InvalidRequest for an image that does not fit the tower."""
        t, h, w = image.grid
        colours = len(image.mean)
        patch = self._module.patch_embed.proj.weight  # (size, time, height, width, colours)
        if len(image.pixels) != t * h * w * patch.size // patch.shape[0]:
            raise InvalidRequest(
                "the model's preprocessor_config.json does not fit its vision tower; use a whole "
                "copy of the model",
                param="model",
            )
        pixels = mx.array(cast("mx.array", memoryview(image.pixels))).reshape(
            t * h * w, colours, -1
        )
        mean, std = (mx.array(each)[:, None] for each in (image.mean, image.std))
        normal = (pixels.astype(mx.float32) / 255 - mean) / std
        normal = normal.reshape(t * h * w, -1).astype(patch.dtype)
        steps, blocks = list[mx.array](), self._module.blocks
        self._module.blocks = [_recorded(block, steps) for block in blocks]
        try:
            rows, deep = self._module(normal, mx.array([image.grid]))
        finally:
            self._module.blocks = blocks
        return Features(rows, deep, steps)


def _recorded(block: Callable[..., mx.array], steps: list[mx.array]) -> Callable[..., mx.array]:
    def call(*args: Any, **named: Any) -> mx.array:
        steps.append(block(*args, **named))
        return steps[-1]

    return call


def load_tower(
    checkpoint: Checkpoint, vision: Vision | None, dtype: mx.Dtype, layers: int
) -> tuple[Tower | None, str]:
    """The tower, and "read" or the reason why the model reads no images here.

    `layers`: those of the generator.
    """
    if vision is None:
        return None, "this model reads text only, or its images are of a kind that is not built in"
    names = _tensors(checkpoint)
    if not names:
        return None, (
            "this copy of the model has no vision tower, as conversions for text alone; use one "
            "with it"
        )
    if not has_extra():
        return None, ADD_IMAGES
    if layers < vision.deep:
        return None, (
            f"the first {vision.deep} layers of this model read images, and its first node has "
            f"{layers}; give it more layers"
        )
    if not _is_sound(vision.tower):
        return None, "the sizes in vision_config of config.json are not those of a tower"
    files = {file: cast("dict[str, mx.array]", mx.load(file)) for file in set(names.values())}
    weights = {name: files[names[name]][name] for name in names}
    try:
        module = _filled(vision, weights, checkpoint.config)
    except (ImportError, *FORWARD_FAULTS) as fault:
        return None, f"its vision tower cannot be loaded ({headline(fault)})"
    module.eval()
    cast_parameters(module, dtype)
    mx.eval(module.parameters())
    return Tower(module, vision), "read"


def _tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """The file of each of the tower's tensors, as the checkpoint names it."""
    return {
        name: str(checkpoint.folder / tensor.file)
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(TOWER_PREFIXES)
    }


def _is_sound(config: Mapping[str, Any]) -> bool:
    sizes = [value for value in config.values() if isinstance(value, (int, float))]
    depth: Any = config.get("depth")
    return type(depth) is int and 0 < depth <= _MAX_DEPTH and all(abs(s) < _MAX_SIZE for s in sizes)


def _filled(vision: Vision, weights: dict[str, mx.array], config: Mapping[str, Any]) -> Any:
    """Raises ImportError, and what a module of other shapes raises."""
    module_class, config_class = _classes()
    module = module_class(config_class.from_dict({**vision.tower, "model_type": "qwen3_vl"}))
    prefix = next(p for p in TOWER_PREFIXES if next(iter(weights)).startswith(p))
    named = module.sanitize({name.removeprefix(prefix): v for name, v in weights.items()})
    packed = {name.removesuffix(".scales") for name in named if name.endswith(".scales")}
    if packed:
        bits: Any = config.get("quantization") or config.get("quantization_config") or {}
        nn.quantize(
            module,
            bits.get("group_size", 64),
            bits.get("bits", 4),
            class_predicate=lambda path, _: path in packed,
        )
    module.load_weights(list(named.items()))
    return module


def _classes() -> tuple[Any, Any]:
    """The tower's class and its config's, without the packages around their modules: those patch
    transformers and import what a tower never uses."""
    path: Any = None
    for name in ("mlx_vlm", "mlx_vlm.models", "mlx_vlm.models.qwen3_vl"):
        if name not in sys.modules:
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"there is no {name}")
            package = ModuleType(name)
            package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
            sys.modules[name] = package
        path = sys.modules[name].__path__
    from mlx_vlm.models.qwen3_vl.config import VisionConfig
    from mlx_vlm.models.qwen3_vl.vision import VisionModel

    return VisionModel, VisionConfig
