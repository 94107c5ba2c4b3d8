"""Faults of a GPU, by the words of MLX and of the systems, and the shorter chunks that avoid them.

The words: mlx/backend/metal/device.cpp and allocator.cpp, mlx/backend/cuda/utils.cpp, and Metal's
errors in ml-explore/mlx issues 3267 and 3302, jundot/omlx issue 1387. MLX up to 0.31 ends the
process with them, later ones raise RuntimeError in whichever call comes next.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

GpuFault = Literal["watchdog", "memory", "device"]
"""A command took too long for the system; there was no memory; the GPU fails in another way."""

SHORTEST: Final = 32
"""Rows of a chunk that is not shortened again: that many rows cost little more than one."""
MEASUREMENT: Final = "measurement"
"""The `param` of a fault in a measurement between answers: it had no rows of a prompt."""

_CALLBACK: Final = "kIOGPUCommandBufferCallbackError"
_WORDS: Final[Mapping[GpuFault, re.Pattern[str]]] = {
    "watchdog": re.compile(
        rf"{_CALLBACK}(?:ImpactingInteractivity|Timeout|Hang)\b"
        r"|failed: the launch timed out and was terminated"
    ),
    "memory": re.compile(
        rf"{_CALLBACK}OutOfMemory\b|\[metal::malloc\] Attempting to allocate "
        r"|\[malloc\] Unable to allocate |failed: out of memory"
    ),
    "device": re.compile(
        r"\[METAL\] Command buffer execution failed"
        r"|failed: (?:an illegal memory access was encountered|unspecified launch failure)"
    ),
}
_WHAT: Final[Mapping[GpuFault, str]] = {
    "watchdog": "the system's watchdog stopped the GPU",
    "memory": "the GPU ran out of memory",
    "device": "the GPU failed",
}


@dataclass(frozen=True, slots=True, order=True)
class ChunkLimit:
    """The most rows of a prompt in one forward on a node, after a GPU fault with more of them."""

    rows: int
    fault: GpuFault

    def __str__(self) -> str:
        return f"prompts are read {self.rows} tokens at a time, since {_WHAT[self.fault]} at more"


def gpu_fault(words: str) -> GpuFault | None:
    """The fault that an error, or the last lines of a process, tells of."""
    return next((fault for fault in get_args(GpuFault) if _WORDS[fault].search(words)), None)


def is_failed_command(words: str) -> bool:
    """Whether a command had begun, so that what it should have written is undefined."""
    return any(_WORDS[fault].search(words) for fault in ("watchdog", "device"))


def shortened(chunk: int, fault: GpuFault, *, is_short: bool = False) -> ChunkLimit | None:
    """The limit after a fault with `chunk` rows; None where a shorter chunk is not the remedy.

    Want of memory shortens once, and not where it `is_short` by that already: what else fills the
    memory does not shrink with the chunk.
    """
    if fault == "device" or (fault == "memory" and is_short) or chunk <= SHORTEST:
        return None
    return ChunkLimit(max(SHORTEST, chunk // 2), fault)


def limit_of(rows: int, fault: str) -> ChunkLimit | None:
    """The limit that a message or a file names, or None if it names none."""
    named = next((each for each in get_args(GpuFault) if each == fault), None)
    return None if named is None or rows < SHORTEST else ChunkLimit(rows, named)
