"""The vision tower beside a text model, filled from the same checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from ...mtp.families.weights import cast_parameters
from ...mtp.image_blocks import see_whole_images
from ...mtp.placed_rope import RopePositions, deepen, place_ropes
from ...mtp.seams import FORWARD_FAULTS
from ...placement.errors import InvalidRequest
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.vision import Vision, is_sound
from ..checkpoint.vision_extra import ADD_IMAGES, TOWER_PREFIXES, has_extra
from ..text.image_rows import PreparedImage
from .model_faults import headline
from .open_model import parameters_of
from .tower_modules import Features, TowerModule, tower_module


def placed_positions(model: nn.Module, vision: Vision | None) -> RopePositions:
    """The positions that the ropes of `model` take from now on: those of text where it reads no
    images, and until somebody sets others."""
    if vision is None:
        return RopePositions()
    layers = cast(Any, model).layers
    positions = RopePositions(vision.section, joins_images=vision.image_rows > 0)
    place_ropes(model, positions)
    deepen(layers[: vision.deep], positions)
    if positions.joins_images:
        see_whole_images(layers, positions)
    return positions


def embedding_of(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """Ids (1, n) -> (1, n, H) of a model with a tower."""
    return cast(Any, model).language_model.model.embed_tokens


class Tower:
    """A vision tower in memory. All methods run on the compute thread."""

    def __init__(self, module: TowerModule, vision: Vision) -> None:
        self._module = module
        self.vision = vision

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(p.nbytes for p in parameters_of(cast("nn.Module", self._module)))

    def features(self, image: PreparedImage) -> Features:
        """Raises InvalidRequest for an image that does not fit the tower."""
        if not self._module.fits(image):
            raise InvalidRequest(
                "the model's preprocessor_config.json does not fit its vision tower; use a whole "
                "copy of the model",
                param="model",
            )
        return self._module.features(image)


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
    if not is_sound(vision.tower):
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


def _filled(vision: Vision, weights: dict[str, mx.array], config: Mapping[str, Any]) -> Any:
    """Raises ImportError, and what a module of other shapes raises."""
    module: Any = tower_module(vision, config)
    named = module.named(weights)
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
