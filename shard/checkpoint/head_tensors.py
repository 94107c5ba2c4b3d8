"""The native MTP head of a checkpoint, found by its tensors; config.json alone is not believed.

A head is found only when every tensor that config.json predicts is there in the predicted shape,
and none besides: a partial set of experts drafts nonsense without any error. `head_layouts`
predicts the tensors; each may be stored plain, packed by mlx, or in FP8 blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .checkpoint import Checkpoint, indexed_tensors, text_config
from .head_layouts import layouts_of
from .head_shapes import HeadLayout, HeadTensors, LayoutName, RequiredSizes, Shape, size
from .headers import Tensor

_ORIGINAL = "Use the original repository: conversions by mlx_lm.convert drop these tensors."
_READABLE = "Use a repository whose head is in bfloat16 or quantised by mlx in its affine mode."

_FLOATS = ("BF16", "F16", "F32")
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_FP8_BLOCK = 128
"""Rows and columns to a scale, as DeepSeek-V3 has them."""
_CLAIMS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


_TensorStorage = tuple[tuple[str, ...], int | None]
"""A tensor that can be read: its scales and biases, and its bits where mlx packed it."""


class _UnusableHead(Exception):
    """Why a head cannot be used, with the remedy, in words for a person."""


@dataclass(frozen=True, slots=True)
class HeadFound:
    """A complete head under its canonical names, which stand after the layout's prefix.

    "qwen": after `mtp.`, so `fc.weight`, `layers.0.mlp.up_proj.weight`, …
    "nextn": after `model.layers.{num_hidden_layers}.`, so `eh_proj.weight`, `mlp.gate.weight`, …
    "mimo": after `model.mtp_layers.0.`, so `input_proj.weight`, `mlp.up_proj.weight`, …
    "ernie": after `model.`, so `mtp_linear_proj.0.weight`, `mtp_block.0.mlp.…`, …
    "longcat": as "nextn", from the names after `model.mtp.`
    "nemotron": as "nextn", from the names after `mtp.`; blocks keep their `layers.N.`
    "mimo_v2", "step": as "nextn", from the names of the first of their layers

    `files` contain it, by their paths in the checkpoint. `shares_file_with_backbone`: each of them
    also contains backbone tensors, so that the head's norms are stored as theirs. `bits`: of each
    matrix that mlx packed; publishers mix them within a head.
    """

    layout: LayoutName
    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]
    shares_file_with_backbone: bool
    bits: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class HeadMissing:
    """Why there is no usable head, with the remedy, in words for a person."""

    reason: str


def find_head(checkpoint: Checkpoint) -> HeadFound | HeadMissing:
    """The checkpoint's native MTP head, or why it has none that can be used."""
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
    bits = _check(layout, text_config(checkpoint.config), tensors)
    files = {tensor.file for tensor in tensors.values()}
    names = {tensor.name for tensor in tensors.values()}
    with_backbone = {t.file for t in checkpoint.tensors.values() if t.name not in names}
    return HeadFound(
        layout=layout.name,
        tensors=MappingProxyType(tensors),
        files=tuple(sorted(files)),
        shares_file_with_backbone=files <= with_backbone,
        bits=MappingProxyType(bits),
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


def _check(layout: HeadLayout, config: Mapping[str, Any], tensors: HeadTensors) -> dict[str, int]:
    """The bits of each packed matrix. Raises _UnusableHead."""
    sizes = RequiredSizes(config)
    shapes = dict(layout.shapes(sizes, tensors))
    if sizes.absent:
        raise _UnusableHead(
            f"config.json gives no {' and no '.join(sizes.absent)}, so the MTP head cannot be "
            "checked. Use the original repository's config.json."
        )
    if missing := [name for name in shapes if name not in tensors]:
        raise _incomplete(missing, shapes[missing[0]], tensors)
    expected, bits = set(shapes), dict[str, int]()
    for name, shape in shapes.items():
        fp8 = layout.reads_fp8(config)
        companions, packed_bits = _storage_of(name, shape, tensors, fp8=fp8)
        expected.update(companions)
        if packed_bits is not None:
            bits[name] = packed_bits
    if extra := sorted(set(tensors) - expected):
        raise _UnusableHead(
            f"the MTP head has {len(extra)} tensors that config.json does not predict, "
            f"the first {tensors[extra[0]].name}. {_ORIGINAL}"
        )
    return bits


def _incomplete(missing: list[str], shape: Shape, tensors: HeadTensors) -> _UnusableHead:
    """The fault in the checkpoint's own names: the prefix is that of the tensors that it has."""
    first = missing[0]
    beside = first.split(".")[0]
    prefixes = {
        t.name.removesuffix(name): name for name, t in tensors.items() if t.name.endswith(name)
    }
    near = next((prefix for prefix, name in prefixes.items() if name.startswith(beside)), None)
    prefix = next(iter(prefixes), "") if near is None else near
    others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
    return _UnusableHead(
        f"the MTP head is incomplete: {prefix}{first}, expected in shape {shape}, "
        f"is missing{others}. {_ORIGINAL}"
    )


def _storage_of(name: str, shape: Shape, tensors: HeadTensors, *, fp8: bool) -> _TensorStorage:
    """How `name`, predicted in `shape`, is stored. Raises _UnusableHead."""
    tensor = tensors[name]
    if len(shape) > 1 and name.endswith(".weight"):
        if tensor.dtype == "U32":
            return _packed(name, shape, tensors)
        if tensor.dtype == "F8_E4M3" and fp8:
            return _blocks(name, shape, tensors)
    if tensor.dtype not in _FLOATS:
        raise _unreadable(tensor)
    _require_shape(tensor, shape)
    return (), None


def _require_shape(tensor: Tensor, shape: Shape) -> None:
    if tensor.shape != shape:
        raise _UnusableHead(
            f"the MTP head's {tensor.name} has shape {tensor.shape}, expected {shape}. {_ORIGINAL}"
        )


def _packed(name: str, shape: Shape, tensors: HeadTensors) -> _TensorStorage:
    """mlx packs inputs of `bits` each into uint32; a scale and a bias for each group of inputs."""
    packed, stem = tensors[name], name.removesuffix("weight")
    *outer, inputs = shape
    bits, rest = divmod(packed.shape[-1] * 32, inputs) if packed.shape and inputs else (0, 1)
    if list(packed.shape[:-1]) != outer or rest or bits not in _BITS:
        raise _UnusableHead(
            f"the MTP head's quantised {packed.name} has shape {packed.shape}, "
            f"which no bits give for {shape}. {_ORIGINAL}"
        )
    scales = tensors.get(f"{stem}scales")
    if scales is not None and scales.dtype not in _FLOATS:
        raise _UnusableHead(
            f"the MTP head's {packed.name} is quantised with scales of {scales.dtype} (an mx or nv "
            f"format), which is not read. {_READABLE}"
        )
    groups = {(*outer, inputs // group) for group in _GROUPS if inputs % group == 0}
    for part in ("scales", "biases"):
        tensor = tensors.get(f"{stem}{part}")
        if tensor is None:
            raise _without(packed, f"{packed.name.removesuffix('weight')}{part}")
        if tensor.shape not in groups or tensor.dtype not in _FLOATS:
            raise _UnusableHead(
                f"the MTP head's {tensor.name} has shape {tensor.shape} of {tensor.dtype}, which "
                f"does not fit {packed.name} of {shape}. {_ORIGINAL}"
            )
        groups = {tensor.shape}
    return (f"{stem}scales", f"{stem}biases"), bits


def _blocks(name: str, shape: Shape, tensors: HeadTensors) -> _TensorStorage:
    weight = tensors[name]
    _require_shape(weight, shape)
    scale = tensors.get(f"{name}_scale_inv")
    if scale is None:
        raise _without(weight, f"{weight.name}_scale_inv")
    if scale.dtype not in _FLOATS:
        raise _unreadable(scale)
    _require_shape(scale, tuple(-(-length // _FP8_BLOCK) for length in shape))
    return (f"{name}_scale_inv",), None


def _unreadable(tensor: Tensor) -> _UnusableHead:
    stored = f"the MTP head's {tensor.name} is stored as {tensor.dtype}, not read."
    return _UnusableHead(f"{stored} {_READABLE}")


def _without(tensor: Tensor, name: str) -> _UnusableHead:
    missing = f"the MTP head's {tensor.name} is quantised but {name} is missing."
    return _UnusableHead(f"{missing} {_ORIGINAL}")
