"""Conversion of arrays to bytes and back, without copies that the wire does not need."""

import math
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ...proto import peer_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}
WIRE: dict[str, "pb.Dtype.ValueType"] = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def to_bytes(array: mx.array) -> bytes:
    """The array's bytes, little-endian, row-major. Evaluates it and copies once."""
    return bytes(memoryview(cast("Buffer", mx.contiguous(array))))


def from_bytes(data: bytes | bytearray, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """The array of `to_bytes`; `data` must have exactly the length that `shape` needs."""
    assert len(data) == math.prod(shape) * ITEM_BYTES[dtype]
    flat = mx.array(cast("mx.array", memoryview(data)))
    return flat.view(DTYPES[dtype]).reshape(shape)
