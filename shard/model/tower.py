"""The vision tower beside a text model, filled from the same checkpoint: mlx-vlm's modules, and
what stands between them and the text model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
from mlx import nn

from ...mtp.families.placed_rope import RopePositions, deepen, place_ropes, see_whole_images
from ...mtp.families.weights import cast_parameters
from ...mtp.schedule import MOST_SCORES
from ...mtp.seams import FORWARD_FAULTS
from ...placement.errors import InvalidRequest
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.vision import ADD_IMAGES, TOWER_PREFIXES, Vision, has_extra, is_sound
from ..text.bare_packages import bare_package
from ..text.image_rows import PreparedImage
from .open_model import headline, parameters_of

Size = tuple[int, int]
"""Patches by height and width."""
SAMPLES: Final = ((16, 16), (24, 32))
COLOURS: Final = 3


class Features(NamedTuple):
    """A tower's output for an image; lazy."""

    rows: mx.array
    """(rows, H), in place of embeddings; the model may multiply both."""
    deep: Sequence[mx.array]
    """(rows, H) for each of the model's first layers; see `RopePositions.deep`."""
    steps: Sequence[mx.array]
    """Outputs of the tower's layers on the way, by which it can be computed in parts."""


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

    def __init__(self, module: Any, vision: Vision) -> None:
        self._module = module
        self.vision = vision

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(p.nbytes for p in parameters_of(self._module))

    def samples(self) -> Iterator[PreparedImage]:
        """Blank images of SAMPLES patches, or of the only size that the tower reads."""
        colours, ends = (0.5, 0.5, 0.5), (0, 0) if self.vision.ends_lines else ()
        for height, width in self._module.samples:
            grid = (1, height, width)
            pixels = bytes(height * width * self._module.patch_numbers)
            yield PreparedImage(self.vision.rows(grid), grid, b"", pixels, colours, colours, ends)

    def features(self, image: PreparedImage) -> Features:
        """Encodes an image; lazy. Raises InvalidRequest if it does not fit the tower."""
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
    """The module with its weights. Raises ImportError, and the errors of other shapes."""
    module: Any = _KINDS[vision.kind](vision, config)
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


class _QwenTower(nn.Module):
    """The tower of Qwen3-VL and Qwen3.5. The classes of other families have the same methods."""

    def __init__(self, vision: Vision, config: Mapping[str, Any]) -> None:
        super().__init__()
        del config
        bare_package("mlx_vlm.models.qwen3_vl")
        from mlx_vlm.models.qwen3_vl.config import VisionConfig
        from mlx_vlm.models.qwen3_vl.vision import VisionModel

        sizes: Any = VisionConfig.from_dict({**vision.tower, "model_type": "qwen3_vl"})
        self.visual: Any = VisionModel(sizes)

    def named(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's tensors as the module's parameters."""
        prefixes = ("model.visual.", "visual.", "vision_tower.")
        prefix = next(p for p in prefixes if next(iter(weights)).startswith(p))
        bare = self.visual.sanitize({name.removeprefix(prefix): v for name, v in weights.items()})
        return {f"visual.{name}": value for name, value in bare.items()}

    def fits(self, image: PreparedImage) -> bool:
        """Whether an image has the pixels that the tower reads."""
        t, h, w = image.grid
        return len(image.pixels) == t * h * w * self.patch_numbers

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch."""
        patch = self.visual.patch_embed.proj.weight  # (size, time, height, width, colours)
        return patch.size // patch.shape[0]

    @property
    def samples(self) -> Sequence[Size]:
        """Sizes of images of which the kernels are those of others, too."""
        return SAMPLES

    def features(self, image: PreparedImage) -> Features:
        t, h, w = image.grid
        normal = _normal(image, (t * h * w, len(image.mean), -1)).reshape(t * h * w, -1)
        steps, blocks = list[mx.array](), self.visual.blocks
        self.visual.blocks = [_recorded(block, steps) for block in blocks]
        try:
            patches = normal.astype(self.visual.patch_embed.proj.weight.dtype)
            rows, deep = self.visual(patches, mx.array([image.grid]))
        finally:
            self.visual.blocks = blocks
        return Features(rows, deep, steps)


class _AverageProjector(nn.Module):
    """Gemma 3: means of squares of patches, normalised and multiplied by a matrix."""

    def __init__(self, merge: int, size: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.mm_input_projection_weight = mx.zeros((size, hidden))
        self.mm_soft_emb_norm = nn.RMSNorm(size, eps)
        self._merge = merge

    def __call__(self, x: mx.array) -> mx.array:
        """Patches (1, n * n, size) -> (rows, hidden)."""
        n, size = round(x.shape[1] ** 0.5) // self._merge, x.shape[2]
        pooled = x.reshape(n, self._merge, n, self._merge, size).mean(axis=(1, 3))
        norm = self.mm_soft_emb_norm
        normed = mx.fast.rms_norm(pooled.reshape(n * n, size), 1.0 + norm.weight, norm.eps)
        return normed @ self.mm_input_projection_weight


class _GemmaTower(nn.Module):
    """Gemma 3's tower, SigLIP's, and its projector."""

    def __init__(self, vision: Vision, config: Mapping[str, Any]) -> None:
        super().__init__()
        bare_package("mlx_vlm.models.gemma3")
        from mlx_vlm.models.gemma3.config import VisionConfig
        from mlx_vlm.models.gemma3.vision import VisionModel

        sizes: Any = VisionConfig.from_dict(dict(vision.tower))
        self.vision_tower: Any = VisionModel(sizes)
        # mlx-vlm leaves this norm its class's default.
        self.vision_tower.vision_model.post_layernorm.eps = sizes.layer_norm_eps
        hidden = config["text_config"]["hidden_size"]
        self.multi_modal_projector = _AverageProjector(
            vision.merge, sizes.hidden_size, hidden, sizes.layer_norm_eps
        )
        # mlx-lm multiplies what stands in place of embeddings by this number, too.
        self._scale = cast("float", mx.array(hidden**0.5, mx.bfloat16).item())
        self._side = sizes.image_size // sizes.patch_size
        self._patch = sizes.patch_size

    def named(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return self.vision_tower.sanitize(_with_inner_name(weights))

    def fits(self, image: PreparedImage) -> bool:
        grid = (1, self._side, self._side)
        return image.grid == grid and len(image.pixels) == self._side**2 * self.patch_numbers

    @property
    def patch_numbers(self) -> int:
        return self._patch**2 * COLOURS

    @property
    def samples(self) -> Sequence[Size]:
        return [(self._side, self._side)]

    def features(self, image: PreparedImage) -> Features:
        side, model = self._side * self._patch, self.vision_tower.vision_model
        normal = _normal(image, (len(image.mean), side, side)).transpose(1, 2, 0)[None]
        x = model.embeddings(normal.astype(model.embeddings.patch_embedding.weight.dtype))
        steps = list[mx.array]()
        for layer in model.encoder.layers:
            steps.append(x := layer(x))
        rows = self.multi_modal_projector(model.post_layernorm(x))
        return Features(rows.astype(mx.float32) / self._scale, (), steps)


class _MistralProjector(nn.Module):
    """Mistral 3: squares of patches, joined and multiplied by three matrices."""

    def __init__(self, merge: int, size: int, text: Mapping[str, Any], *, bias: bool) -> None:
        super().__init__()
        hidden = text["hidden_size"]
        self.norm = nn.RMSNorm(size, text.get("rms_norm_eps", 1e-5))
        self.patch_merger = nn.Module()
        self.patch_merger.merging_layer = nn.Linear(size * merge * merge, size, bias=False)
        self.linear_1 = nn.Linear(size, hidden, bias=bias)
        self.linear_2 = nn.Linear(hidden, hidden, bias=bias)
        self._merge = merge

    def __call__(self, x: mx.array, height: int, width: int) -> mx.array:
        """Patches (height * width, size) -> (rows, hidden)."""
        m, size = self._merge, x.shape[-1]
        squares = self.norm(x).reshape(height // m, m, width // m, m, size)
        joined = squares.transpose(0, 2, 4, 1, 3).reshape(-1, size * m * m)
        merged: Any = self.patch_merger.merging_layer
        return self.linear_2(nn.gelu(self.linear_1(merged(joined))))


class _MistralTower(nn.Module):
    """Mistral 3's tower, Pixtral's, and its projector."""

    def __init__(self, vision: Vision, config: Mapping[str, Any]) -> None:
        super().__init__()
        bare_package("mlx_vlm.models.pixtral")
        from mlx_vlm.models.pixtral.config import VisionConfig
        from mlx_vlm.models.pixtral.vision import VisionModel, apply_rotary_pos_emb

        self._turned: Any = apply_rotary_pos_emb
        rope: Any = vision.tower.get("rope_parameters") or {}
        fields = {"rope_theta": rope.get("rope_theta", 10000.0), **vision.tower}
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
        sizes: Any = VisionConfig.from_dict(fields)
        self.vision_tower: Any = VisionModel(sizes)
        bias = bool(config.get("multimodal_projector_bias", False))
        self.multi_modal_projector = _MistralProjector(
            vision.merge, sizes.hidden_size, config["text_config"], bias=bias
        )
        self._side = sizes.image_size // sizes.patch_size
        self._patch = sizes.patch_size

    def named(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return self.vision_tower.sanitize(_with_inner_name(weights))

    def fits(self, image: PreparedImage) -> bool:
        time, height, width = image.grid
        is_within = time == 1 and max(height, width) <= self._side
        return is_within and len(image.pixels) == height * width * self.patch_numbers

    @property
    def patch_numbers(self) -> int:
        return self._patch**2 * COLOURS

    @property
    def samples(self) -> Sequence[Size]:
        return [size for size in SAMPLES if max(size) <= self._side]

    def features(self, image: PreparedImage) -> Features:
        """One image at a time, so without mlx-vlm's mask of as many numbers as patches squared.
        Attention is cut, as it is over prompts: a large image has more than ten thousand patches.
        """
        _, height, width = image.grid
        model = self.vision_tower.vision_model
        shape = len(image.mean), height * self._patch, width * self._patch
        normal = _normal(image, shape).transpose(1, 2, 0)[None]
        patches = model.patch_conv(normal.astype(model.patch_conv.weight.dtype))
        x = model.ln_pre(patches.reshape(1, height * width, -1))
        places = mx.arange(height)[:, None] * self._side + mx.arange(width)
        rope = model.patch_positional_embedding(x, places.flatten())
        steps = list[mx.array]()
        for layer in model.transformer.layers:
            x = x + self._attended(layer.attention, layer.attention_norm(x), rope)
            steps.append(x := x + layer.feed_forward(layer.ffn_norm(x)))
        return Features(self.multi_modal_projector(x[0], height, width), (), steps)

    def _attended(self, layer: Any, x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
        """mlx-vlm's attention layer, whose queries come in groups of MOST_SCORES scores a head."""
        _, count, size = x.shape
        q, k, v = (
            project(x).reshape(1, count, layer.num_heads, -1).transpose(0, 2, 1, 3)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = self._turned(q, k, *rope, unsqueeze_dim=0)
        rows = max(1, MOST_SCORES // count)
        parts = [
            mx.fast.scaled_dot_product_attention(q[:, :, at : at + rows], k, v, scale=layer.scale)
            for at in range(0, count, rows)
        ]
        return layer.o_proj(
            mx.concatenate(parts, axis=2).transpose(0, 2, 1, 3).reshape(1, count, size)
        )


_KINDS: Mapping[str, Callable[[Vision, Mapping[str, Any]], nn.Module]] = {
    "qwen": _QwenTower,
    "gemma": _GemmaTower,
    "mistral": _MistralTower,
}


def _with_inner_name(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The names that mlx-vlm has: transformers 5 saves others, which lack a module's name."""
    named, outer, inner = dict[str, mx.array](), "vision_tower.", "vision_tower.vision_model."
    for name, value in weights.items():
        name = name.removeprefix("model.")
        if name.startswith(outer) and not name.startswith(inner):
            name = inner + name.removeprefix(outer)
        named[name] = value
    return named


def _normal(image: PreparedImage, shape: Sequence[int]) -> mx.array:
    """The pixels in `shape`, colours second to last but one or first, as a tower takes them."""
    pixels = mx.array(cast("mx.array", memoryview(image.pixels))).reshape(shape)
    axes = [1] * (len(shape) - shape.index(len(image.mean)) - 1)
    mean, std = (mx.array(each).reshape(-1, *axes) for each in (image.mean, image.std))
    return (pixels.astype(mx.float32) / 255 - mean) / std


def _recorded(block: Callable[..., mx.array], steps: list[mx.array]) -> Callable[..., mx.array]:
    def call(*args: Any, **named: Any) -> mx.array:
        steps.append(block(*args, **named))
        return steps[-1]

    return call
