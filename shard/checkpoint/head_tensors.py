"""The native MTP head of a checkpoint, found by its tensors; config.json alone is not believed.

Names decide here. Whether each tensor that the model's class wants is there in its shape, and none
besides, is checked where the head is loaded (`mtp/families/weights.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from .checkpoint import HEAD_FILES, Checkpoint, indexed_tensors, text_config
from .headers import Tensor

_ORIGINAL = "Use the original repository: conversions by mlx_lm.convert drop these tensors."
_CLAIMS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")

Config = Mapping[str, Any]
LayoutName = Literal[
    "qwen", "nextn", "mimo", "ernie", "longcat", "nemotron", "mimo_v2", "step", "streams"
]

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
        case "qwen4_exp" | "qwen4_exp_text":
            return [HeadLayout("streams", _QWEN, needs_no_prefix=True)]
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


class _UnusableHead(Exception):
    """Why a head cannot be used, with the remedy, in words for a person."""


@dataclass(frozen=True, slots=True)
class HeadFound:
    """A head under its canonical names, which stand after the layout's prefix.

    "qwen", "streams": after `mtp.`, so `fc.weight`, `layers.0.mlp.up_proj.weight`, …
    "nextn": after `model.layers.{num_hidden_layers}.`, so `eh_proj.weight`, `mlp.gate.weight`, …
    "mimo": after `model.mtp_layers.0.`, so `input_proj.weight`, `mlp.up_proj.weight`, …
    "ernie": after `model.`, so `mtp_linear_proj.0.weight`, `mtp_block.0.mlp.…`, …
    "longcat": as "nextn", from the names after `model.mtp.`
    "nemotron": as "nextn", from the names after `mtp.`; blocks keep their `layers.N.`
    "mimo_v2", "step": as "nextn", from the names of the first of their layers

    `files` contain it, by their paths in the checkpoint. `shares_file_with_backbone`: each of them
    also contains backbone tensors, so that the head's norms are stored as theirs.
    """

    layout: LayoutName
    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]
    shares_file_with_backbone: bool

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def quantised(self) -> bool:
        """Whether mlx packed a matrix of it."""
        return any(tensor.dtype == "U32" for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class HeadMissing:
    """Why there is no usable head, with the remedy, in words for a person."""

    reason: str


def find_head(checkpoint: Checkpoint) -> HeadFound | HeadMissing:
    """The checkpoint's native MTP head, or why it has none."""
    try:
        return _usable_head(checkpoint)
    except _UnusableHead as fault:
        return HeadMissing(str(fault))


def _usable_head(checkpoint: Checkpoint) -> HeadFound:
    claim = _claim(checkpoint.config)
    layout, tensors = _collect(checkpoint, claim)
    if claim is not None and claim[1] > 1 and not layout.ignores_further_layers:
        raise _UnusableHead(
            f"the MTP head has {claim[1]} layers ({claim[0]} = {claim[1]} in config.json), and "
            "only heads of one are implemented. Remove [native_mtp] from the card."
        )
    files = {tensor.file for tensor in tensors.values()}
    names = {tensor.name for tensor in tensors.values()}
    with_backbone = {t.file for t in checkpoint.tensors.values() if t.name not in names}
    return HeadFound(
        layout=layout.name,
        tensors=MappingProxyType(tensors),
        files=tuple(sorted(files)),
        shares_file_with_backbone=files <= with_backbone,
    )


def files_of_head(folder: Path, config: Mapping[str, Any], files: frozenset[str]) -> frozenset[str]:
    """The files with a head's tensors, by the index alone; all `files` where there is no index."""
    names = indexed_tensors(folder)
    if not names:
        return files
    layouts = layouts_of(text_config(config))
    head_files = {
        file
        for name, file in names.items()
        for layout in layouts
        if layout.canonical(Tensor(name, "", (), file, 0, 0)) is not None
    }
    return frozenset(head_files) & files


def _claim(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The field of config.json that declares a head, and of how many layers."""
    for part in (text_config(config), config):
        for key in _CLAIMS:
            if layers := size(part, key):
                return key, layers
    return None


def _collect(
    checkpoint: Checkpoint, claim: tuple[str, int] | None
) -> tuple[HeadLayout, dict[str, Tensor]]:
    """The layout that the checkpoint has tensors of, and those."""
    collected: list[tuple[HeadLayout, dict[str, Tensor]]] = []
    for layout in layouts_of(text_config(checkpoint.config)):
        tensors = _of_layout(checkpoint, layout)
        if tensors and (claim or any(name.startswith(layout.markers) for name in tensors)):
            collected.append((layout, tensors))
    if len(collected) > 1:
        names = [next(iter(tensors.values())).name for _, tensors in collected]
        raise _UnusableHead(
            f"the checkpoint holds two MTP heads, one with {names[0]} and one with {names[1]}. "
            "Remove the file with the head that does not belong to it."
        )
    if not collected:
        raise _stripped_or_none(checkpoint, claim)
    return collected[0]


def _of_layout(checkpoint: Checkpoint, layout: HeadLayout) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors.values():
        name = layout.canonical(tensor)
        if name is None:
            continue
        if name in tensors:
            raise _UnusableHead(
                f"the checkpoint holds the MTP head's {name} twice, as {tensors[name].name} and "
                f"{tensor.name}. Remove the file with the head that does not belong to it."
            )
        tensors[name] = tensor
    return tensors


def _stripped_or_none(checkpoint: Checkpoint, claim: tuple[str, int] | None) -> _UnusableHead:
    if claim is None:
        return _UnusableHead("the checkpoint has no MTP head, and config.json declares none.")
    key, layers = claim
    names = "mtp.*"
    index = size(text_config(checkpoint.config), "num_hidden_layers")
    if key == "num_nextn_predict_layers" and index:
        names += f" and no model.layers.{index}.*"
    return _UnusableHead(
        f"config.json declares an MTP head ({key} = {layers}), but the checkpoint holds no "
        f"{names} tensors: they were stripped. {_ORIGINAL} `exo-node models graft` brings them "
        "back."
    )
