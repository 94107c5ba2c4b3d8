"""The errors of a model class that does not fit its config.json."""

from ...mtp.seams import FORWARD_FAULTS

MODEL_FAULTS = (
    *FORWARD_FAULTS,
    ImportError,
    OSError,
    SystemExit,  # a class whose import lacks a library
)
"""The errors of a model class for a config.json that does not fit it."""


def headline(fault: BaseException) -> str:
    """The type and first line of a model class's error: MLX appends a page of signatures."""
    line = (str(fault).splitlines() or [""])[0]
    return f"{type(fault).__name__}: {line[:200]}"
