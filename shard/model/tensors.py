"""Arrays as bytes, without copies that the wire does not need, and whether they are finite."""

import math
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from ...placement.errors import NumericError
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

REMEDY = (
    "the checkpoint may be damaged, or its numbers too large for float16: load it in bfloat16 or "
    "float32, or download it anew"
)

# A number whose exponent bits are all 1 is infinite or NaN.
_EXPONENT: dict[str, tuple[str, int]] = {
    "float32": ("<u4", 0x7F800000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
}


def to_bytes(array: mx.array) -> bytes:
    """The array's bytes, little-endian, row-major. Evaluates it and copies once."""
    return bytes(memoryview(cast("Buffer", mx.contiguous(array))))


def from_bytes(data: bytes | bytearray, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """The array of `to_bytes`; `data` must have exactly the length that `shape` needs."""
    assert len(data) == math.prod(shape) * ITEM_BYTES[dtype]
    flat = mx.array(cast("mx.array", memoryview(data)))
    return flat.view(DTYPES[dtype]).reshape(shape)


def last_row_is_finite(data: bytes, dtype: str, rows: int) -> bool:
    """Whether the last of `rows` rows on the wire has no NaN and no infinity.

    A number that is not finite in an earlier row reaches the later ones through attention.
    """
    kind, mask = _EXPONENT[dtype]
    row = np.frombuffer(data, kind, offset=len(data) // rows * (rows - 1))
    return not bool(np.any((row & mask) == mask))


def require_finite(data: bytes, dtype: str, position: int, rows: int, stage: str) -> None:
    """Checks the last row of a stage's hidden states. Raises NumericError if it is not finite."""
    if not last_row_is_finite(data, dtype, rows):
        raise NumericError(
            f"{stage} gave hidden states that are not finite at position {position + rows - 1}, in "
            f"{dtype}; {REMEDY}"
        )


def numeric_error(position: int, dtype: str, *, alone: bool) -> NumericError:
    """The error for logits that are not finite.

    `alone`: whether the generator holds the whole model. If not, the hidden states of the other
    stages were finite, so its norm or lm_head is at fault.
    """
    part = "stage 0" if alone else "stage 0 (its norm and lm_head, after the last stage)"
    return NumericError(
        f"{part} gave logits that are not finite for the token at position {position}, in {dtype}; "
        f"{REMEDY}"
    )


def parked_reason(position: int, drafter: str) -> str:
    """The reason why a draft head or a drafter is no longer used."""
    return (
        f"the logits of {drafter} were not finite at position {position}, so it drafts nothing "
        f"until the model is loaded again; {REMEDY}"
    )
