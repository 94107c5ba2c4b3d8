"""Durations as people and Ollama's clients write them; pure."""

import math
import re
from typing import Final

LONGEST: Final = 10 * 365 * 86_400.0
"""In seconds; longer ones are for ever."""
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,9})?")


def duration_s(value: str | int | float) -> float:
    """Seconds of 300, "300", "5m" or "1h30m"; infinity for what is negative or beyond ten years.

    Raises ValueError with the remedy.
    """
    text = str(value).strip().lower()
    if text in ("never", "forever"):
        return math.inf
    if _NUMBER.fullmatch(text):
        return _bounded(float(text))
    sign, parts = text.startswith("-"), text.removeprefix("-")
    if not parts or _PART.sub("", parts):
        raise ValueError(
            f"{str(value)[:40]!r} is no duration; give seconds, a duration such as 5m or 1h30m, "
            "0, or -1 for ever"
        )
    total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(parts))
    return math.inf if sign else _bounded(total)


def _bounded(seconds: float) -> float:
    return seconds if 0 <= seconds <= LONGEST else math.inf
