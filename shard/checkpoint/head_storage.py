"""How one tensor of an MTP head may be stored: plain, packed by mlx, or in FP8 blocks."""

from dataclasses import dataclass

from .head_shapes import HeadTensors, Shape
from .headers import Tensor

ORIGINAL = "Use the original repository: conversions by mlx_lm.convert drop these tensors."
READABLE = "Use a repository whose head is in bfloat16 or quantised by mlx in its affine mode."

_FLOATS = ("BF16", "F16", "F32")
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_FP8_BLOCK = 128
"""Rows and columns to a scale, as DeepSeek-V3 has them."""


@dataclass(frozen=True, slots=True)
class TensorStorage:
    """A tensor that can be read: its scales and biases, and its bits where mlx packed it."""

    companions: tuple[str, ...] = ()
    bits: int | None = None


class UnusableHead(Exception):
    """Why a head cannot be used, with the remedy, in words for a person."""


def storage_of(name: str, shape: Shape, tensors: HeadTensors, *, fp8: bool) -> TensorStorage:
    """How `name`, predicted in `shape`, is stored. Raises UnusableHead."""
    tensor = tensors[name]
    if len(shape) > 1 and name.endswith(".weight"):
        if tensor.dtype == "U32":
            return _packed(name, shape, tensors)
        if tensor.dtype == "F8_E4M3" and fp8:
            return _blocks(name, shape, tensors)
    if tensor.dtype not in _FLOATS:
        raise _unreadable(tensor)
    _require_shape(tensor, shape)
    return TensorStorage()


def _require_shape(tensor: Tensor, shape: Shape) -> None:
    if tensor.shape != shape:
        raise UnusableHead(
            f"the MTP head's {tensor.name} has shape {tensor.shape}, expected {shape}. {ORIGINAL}"
        )


def _packed(name: str, shape: Shape, tensors: HeadTensors) -> TensorStorage:
    """mlx packs inputs of `bits` each into uint32; a scale and a bias for each group of inputs."""
    packed, stem = tensors[name], name.removesuffix("weight")
    *outer, inputs = shape
    bits, rest = divmod(packed.shape[-1] * 32, inputs) if packed.shape and inputs else (0, 1)
    if list(packed.shape[:-1]) != outer or rest or bits not in _BITS:
        raise UnusableHead(
            f"the MTP head's quantised {packed.name} has shape {packed.shape}, "
            f"which no bits give for {shape}. {ORIGINAL}"
        )
    scales = tensors.get(f"{stem}scales")
    if scales is not None and scales.dtype not in _FLOATS:
        raise UnusableHead(
            f"the MTP head's {packed.name} is quantised with scales of {scales.dtype} (an mx or nv "
            f"format), which is not read. {READABLE}"
        )
    groups = {(*outer, inputs // group) for group in _GROUPS if inputs % group == 0}
    for part in ("scales", "biases"):
        tensor = tensors.get(f"{stem}{part}")
        if tensor is None:
            raise _without(packed, f"{packed.name.removesuffix('weight')}{part}")
        if tensor.shape not in groups or tensor.dtype not in _FLOATS:
            raise UnusableHead(
                f"the MTP head's {tensor.name} has shape {tensor.shape} of {tensor.dtype}, which "
                f"does not fit {packed.name} of {shape}. {ORIGINAL}"
            )
        groups = {tensor.shape}
    return TensorStorage((f"{stem}scales", f"{stem}biases"), bits)


def _blocks(name: str, shape: Shape, tensors: HeadTensors) -> TensorStorage:
    weight = tensors[name]
    _require_shape(weight, shape)
    scale = tensors.get(f"{name}_scale_inv")
    if scale is None:
        raise _without(weight, f"{weight.name}_scale_inv")
    if scale.dtype not in _FLOATS:
        raise _unreadable(scale)
    _require_shape(scale, tuple(-(-length // _FP8_BLOCK) for length in shape))
    return TensorStorage((f"{name}_scale_inv",))


def _unreadable(tensor: Tensor) -> UnusableHead:
    stored = f"the MTP head's {tensor.name} is stored as {tensor.dtype}, not read."
    return UnusableHead(f"{stored} {READABLE}")


def _without(tensor: Tensor, name: str) -> UnusableHead:
    missing = f"the MTP head's {tensor.name} is quantised but {name} is missing."
    return UnusableHead(f"{missing} {ORIGINAL}")
