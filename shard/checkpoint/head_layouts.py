"""The layouts of MTP heads, by the names of their tensors, and those that a checkpoint may have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from .checkpoint import HEAD_FILES
from .headers import Tensor

Config = Mapping[str, Any]
LayoutName = Literal["qwen", "nextn", "mimo", "ernie", "longcat", "nemotron", "mimo_v2", "step"]

_LAYER: Final = (
    r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(?P<layer>\d{1,6})\.(?P<name>.+)"
)
_QWEN: Final = r"(?:language_model\.(?:model\.)?|model\.(?:language_model\.)?)?mtp\.(?P<name>.+)"
_MIMO: Final = r"model\.mtp_layers\.(?P<layer>\d{1,6})\.(?P<name>.+)"
_MIMO_V2: Final = r"model\.mtp\.layers\.(?P<layer>\d{1,6})\.(?P<name>.+)"
_ERNIE: Final = (
    r"model\.(?P<name>mtp_(?:emb_norm|hidden_norm|linear_proj|block)\.(?P<layer>\d{1,6})\..+)"
)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A way to store an MTP head.

    `pattern` matches its tensors: `name` in the head, and the `layer` that they belong to. `first`
    is the head's layer, `renamed` are replacements in its names, as regular expressions. `markers`
    are beginnings of names of which one must be there if config.json declares no head.
    """

    name: LayoutName
    pattern: str
    first: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    markers: tuple[str, ...] = ("",)
    ignores_further_layers: bool = False
    """Whether only the first of a head's layers is read."""
    needs_no_prefix: bool = False
    """Whether names in a file of the head's own may be bare."""

    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head, its whole name if it lies in a layer further on, or None
        if it is not of it."""
        match = re.fullmatch(self.pattern, tensor.name)
        if match is None:
            other = any(re.fullmatch(pattern, tensor.name) for pattern in (_LAYER, _MIMO))
            bare = self.needs_no_prefix and tensor.file in HEAD_FILES and not other
            return tensor.name if bare else None
        layer = int(match.groupdict().get("layer", self.first))
        if layer != self.first:
            return None if layer < self.first or self.ignores_further_layers else tensor.name
        name = match["name"]
        for old, new in self.renamed:
            name = re.sub(old, new, name)
        return name


_LAYOUTS: Final = (
    HeadLayout("qwen", _QWEN, needs_no_prefix=True),
    HeadLayout("mimo", _MIMO),
    HeadLayout("ernie", _ERNIE),
)
_LONGCAT: Final = HeadLayout(
    "longcat",
    r"model\.mtp\.(?:layers\.0\.)?(?P<name>.+)",
    renamed=(
        (r"^transformer_layer\.", ""),
        (r"norm\.m\.", "norm."),
        (r"^norm\.weight$", "shared_head.norm.weight"),
    ),
)
_NEMOTRON: Final = HeadLayout(
    "nemotron",
    r"mtp\.(?P<name>.+)",
    renamed=(
        (r"^layers\.0\.(?=enorm|hnorm|eh_proj)", ""),
        (r"^layers\.1\.final_layernorm", "shared_head.norm"),
    ),
)
_MIMO_V2_FLASH: Final = HeadLayout(
    "mimo_v2",
    _MIMO_V2,
    renamed=(
        (r"final_layernorm\.", "shared_head.norm."),
        (r"pre_mlp_layernorm\.", "post_attention_layernorm."),
    ),
    ignores_further_layers=True,
)


def layouts_of(config: Config) -> list[HeadLayout]:
    """The layouts that a checkpoint may have, by its own config.json or that of its text model."""
    index = size(config, "num_hidden_layers")
    match config.get("model_type"):  # their names are also those of other layouts
        case "longcat_flash":
            return [_LONGCAT]
        case "nemotron_h":
            return [_NEMOTRON]
        case "mimo_v2_flash":
            return [_MIMO_V2_FLASH]
        case "step3p5":
            step = HeadLayout("step", _LAYER, index or 0, ignores_further_layers=True)
            return [step] if index else []
        case _:
            # No decoder layer has the markers. Layers past the last without them may be a config's
            # mistake.
            markers = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
            nextn = HeadLayout("nextn", _LAYER, index or 0, markers=markers)
            return [*_LAYOUTS, nextn] if index else list(_LAYOUTS)


def size(config: Config, key: str) -> int | None:
    """A whole number of config.json; None where it is absent or anything else."""
    value: object = config.get(key)
    return value if type(value) is int else None
