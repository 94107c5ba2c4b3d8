"""Which models to propose for the memory that there is."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

READABLE: Final = 8.0
"""Tokens a second: slower than people read."""
_NAMED: Final = 8


def best(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Entries of the catalogue that fit, the best first; at most one of each model.

    Those at a readable speed come first, of them those with native MTP; then the most weights
    count, and of one model the format with the most bits.
    """
    fitting = [e for e in entries if e["fits"] and e["fits"]["nodes"] and e["id"] != "demo"]
    chosen: dict[object, Mapping[str, Any]] = {}
    for entry in sorted(fitting, key=_rank):
        _ = chosen.setdefault(entry.get("variant_of") or entry["id"], entry)
    return list(chosen.values())[:_NAMED]


def _rank(entry: Mapping[str, Any]) -> tuple[object, ...]:
    speed = entry["fits"].get("tokens_per_second") or 0.0
    bits = entry.get("quantization") or 16
    return (speed < READABLE, not entry.get("drafts"), -entry["size_bytes"] / bits, -bits)
