"""The sizes of the frames that a stage accepts, which follow from its model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLimits:
    """The limits of the frames of one placement."""

    placement: str
    stage: int
    dtype: str
    hidden_size: int
    max_rows: int
    context_length: int
    vocabulary: int
    kv_bits: int = 0
    """Bits of a number in attention's caches, for the stats, or 0 for those of `dtype`."""
    dtype_reason: str = ""
    """The reason for `dtype`, for the stats."""
