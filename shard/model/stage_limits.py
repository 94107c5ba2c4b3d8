"""What a stage accepts in a frame: the sizes of the model that it serves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What a stage's placement lets a frame be."""

    placement: str
    stage: int
    dtype: str
    hidden_size: int
    max_rows: int
    context_length: int
    vocabulary: int
    kv_bits: int = 0
    """Of each number in attention's caches, told with the stats; 0: as `dtype`."""
    dtype_reason: str = ""
    """Why `dtype`, told with the stats."""
