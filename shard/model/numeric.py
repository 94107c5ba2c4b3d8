"""Checks for numbers that are not finite; errors name the stage, the position and the dtype."""

import numpy as np

from ...placement.errors import NumericError

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


def last_row_is_finite(data: bytes, dtype: str, rows: int) -> bool:
    """Whether the last of `rows` rows on the wire has no NaN and no infinity.

    A number that is not finite in an earlier row reaches the later ones through attention.
    """
    kind, mask = _EXPONENT[dtype]
    row = np.frombuffer(data, kind, offset=len(data) // rows * (rows - 1))
    return not bool(np.any((row & mask) == mask))


def require_finite(data: bytes, dtype: str, position: int, rows: int, stage: str) -> None:
    """Raises NumericError if the last row of a stage's hidden states is not finite."""
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
    part = "stage 0" if alone else "stage 0 (its norm and lm_head, behind the last stage)"
    return NumericError(
        f"{part} gave logits that are not finite for the token at position {position}, in {dtype}; "
        f"{REMEDY}"
    )


def parked_reason(position: int) -> str:
    """The reason why a draft head is no longer used."""
    return (
        f"the draft head's logits were not finite at position {position}, so nothing is drafted "
        f"until the model is loaded anew; {REMEDY}"
    )
