"""The numbers of GGUF's tensors as MLX arrays: quantised blocks as affine groups, or bfloat16.

Blocks of scale times number plus offset are MLX's affine groups of 32, with the same numbers and
scales of float16, which hold those of the file exactly (K-quants: rounded products of two). Other
kinds are dequantised by the `gguf` package. The layouts of blocks:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

# mlx is typed in part only, and gguf need not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
# pyright: reportAttributeAccessIssue=false

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....placement.errors import LoadFailed
from ...checkpoint.gguf_file import GgufFile, GgufTensor

GROUP: Final = 32
_CHUNK: Final = 1 << 24
"""Numbers that are unpacked at a time."""
ADD_GGUF: Final = "pip install 'exo-node[gguf]', or `pip install gguf`"

Bytes = npt.NDArray[Any]
"""Bytes (uint8), a type that NumPy's stubs lose at the first shift."""
Floats = npt.NDArray[np.float32]
Groups = tuple[Bytes, Floats, Floats]
"""Numbers [groups, 32], and the scale and the offset of each group."""
Arrays = dict[str, mx.array]


def _halves(packed: Bytes) -> Bytes:
    """The low halves of the bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bit(packed: Bytes, place: int) -> Bytes:
    """One bit of each number of a block of 32, from 4 bytes."""
    return np.unpackbits(packed[:, place : place + 4], axis=-1, bitorder="little") << 4


def _half(blocks: Bytes, place: int) -> Floats:
    return blocks[:, place : place + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _q4_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Groups:
    return _halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 6:]) | _bit(blocks, 2), scale, -16 * scale


def _q5_1(blocks: Bytes) -> Groups:
    return _halves(blocks[:, 8:]) | _bit(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Groups:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ 128, scale, -128 * scale  # two's complement, begun at -128


def _q4_k(blocks: Bytes) -> Groups:
    numbers = _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, GROUP)
    return numbers, *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Groups:
    numbers = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, GROUP)
    high = np.unpackbits(blocks[:, 16:48, None], axis=-1, bitorder="little")
    numbers |= high.swapaxes(1, 2) << 4
    return numbers.reshape(-1, GROUP), *_k_scales(blocks)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the 8 groups of a block of 256: 6 bits each, times one of the block."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    offsets = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    scale, offset = _half(blocks, 0)[:, None], _half(blocks, 2)[:, None]
    return (scale * scales).reshape(-1), (-offset * offsets).reshape(-1)


_AFFINE: Final[dict[int, tuple[int, Callable[[Bytes], Groups]]]] = {
    2: (4, _q4_0), 3: (4, _q4_1), 6: (5, _q5_0), 7: (5, _q5_1), 8: (8, _q8_0), 12: (4, _q4_k),
    13: (5, _q5_k),
}  # fmt: skip
"""The bits of a number and the groups of its blocks, by kind of tensor."""
_OWN: Final = {
    0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24),
    8: (32, 34), 12: (256, 144), 13: (256, 176),
}  # fmt: skip
"""The numbers and the bytes of a block, of the kinds that need no package."""
_FLOATS: Final = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


def kept_bits(tensor: GgufTensor) -> int | None:
    """The bits of a matrix that stays as it is, or None if it becomes bfloat16."""
    return _AFFINE[tensor.kind][0] if tensor.kind in _AFFINE and len(tensor.shape) > 1 else None


def stored_bytes(file: GgufFile, tensor: GgufTensor) -> int:
    """The size in the file. Raises InvalidCheckpoint, and LoadFailed where only the `gguf` package
    knows this kind."""
    numbers, size = _OWN.get(tensor.kind) or _package_block(file, tensor)
    if tensor.shape[-1] % numbers:
        raise file.fault(f"has rows of {tensor.shape[-1]} in blocks of {numbers}", tensor.name)
    return tensor.elements // numbers * size


def written_bytes(tensor: GgufTensor, bits: int | None) -> int:
    """The size of the arrays that `read_arrays` returns."""
    return tensor.elements * 2 if bits is None else tensor.elements * (bits + 1) // 8


def read_arrays(file: GgufFile, tensor: GgufTensor, bits: int | None, minus: float) -> Arrays:
    """A tensor's arrays by the ends of their names: `weight`, of groups `scales` and `biases` too.

    `bits`: of a kept or a newly quantised matrix, or None for bfloat16. `minus` is subtracted in
    float32.
    Raises InvalidCheckpoint and OSError.
    """
    width = tensor.shape[-1]
    rows = tensor.elements // width
    row_bytes = stored_bytes(file, tensor) // rows
    parts: dict[str, list[mx.array]] = {}
    step = max(1, _CHUNK // width)
    with Path(file.path).open("rb") as stream:
        for row in range(0, rows, step):
            count = min(step, rows - row)
            _ = stream.seek(tensor.offset + row * row_bytes)
            raw = np.frombuffer(stream.read(count * row_bytes), np.uint8)
            if raw.size != count * row_bytes:
                raise file.fault("is cut short", tensor.name)
            arrays = _chunk(file, tensor, raw.reshape(count, -1), bits, minus)
            mx.eval(arrays)
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
    return {
        name: mx.concatenate(chunks).reshape(*tensor.shape[:-1], chunks[0].shape[-1])
        for name, chunks in parts.items()
    }


def _chunk(
    file: GgufFile, tensor: GgufTensor, raw: Bytes, bits: int | None, minus: float
) -> Arrays:
    if bits is not None and bits == kept_bits(tensor):
        return _groups(file, tensor, raw, bits)
    numbers = _dequantised(tensor.kind, raw)
    if not np.isfinite(numbers).all():
        raise file.fault("holds numbers that are not finite", tensor.name)
    weight = mx.array(numbers - np.float32(minus)).astype(mx.bfloat16)
    if bits is None:
        return {"weight": weight}
    quantised = mx.quantize(weight, group_size=GROUP, bits=bits)
    return dict(zip(("weight", "scales", "biases"), quantised, strict=True))


def _groups(file: GgufFile, tensor: GgufTensor, raw: Bytes, bits: int) -> Arrays:
    numbers, scales, offsets = _AFFINE[tensor.kind][1](raw.reshape(-1, _OWN[tensor.kind][1]))
    with np.errstate(over="ignore"):
        halves = [each.astype(np.float16).reshape(len(raw), -1) for each in (scales, offsets)]
    if not all(np.isfinite(each).all() for each in halves):
        raise file.fault("has scales that float16 does not hold", tensor.name)
    words = _packed(numbers, bits).reshape(len(raw), -1).view(np.uint32)
    return {"weight": mx.array(words), "scales": mx.array(halves[0]), "biases": mx.array(halves[1])}


def _packed(numbers: Bytes, bits: int) -> Bytes:
    """Numbers of `bits` bits after one another, the lowest bit first."""
    if bits == 8:
        return np.ascontiguousarray(numbers)
    if bits == 4:
        return numbers[:, ::2] | numbers[:, 1::2] << 4
    eights = np.zeros((len(numbers), GROUP // 8), np.uint64)
    for place in range(8):
        eights |= numbers[:, place::8].astype(np.uint64) << np.uint64(place * bits)
    return eights.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits].reshape(len(numbers), -1)


def _dequantised(kind: int, raw: Bytes) -> Floats:
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).astype(np.float32)
    if kind == 30:  # bfloat16 is the upper half of float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind in _AFFINE:
        numbers, scales, offsets = _AFFINE[kind][1](raw.reshape(-1, _OWN[kind][1]))
        return (numbers * scales[:, None] + offsets[:, None]).reshape(len(raw), -1)
    package = _package()
    return package.quants.dequantize(raw, package.GGMLQuantizationType(kind))


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise LoadFailed(
            f"this file has tensors that only the `gguf` package reads, and it is not installed: "
            f"{ADD_GGUF}, and import again"
        ) from error
    return gguf


def _package_block(file: GgufFile, tensor: GgufTensor) -> tuple[int, int]:
    package = _package()
    try:
        kind = package.GGMLQuantizationType(tensor.kind)
        numbers, size = package.GGML_QUANT_SIZES[kind]
        _ = package.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise file.fault(
            f"is of the kind {tensor.kind}, which the `gguf` package does not read", tensor.name
        ) from error
    return math.ceil(numbers), size
