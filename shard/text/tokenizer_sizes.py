"""Refuses tokenizer files that would take minutes or all memory to read."""

import json
from pathlib import Path
from typing import Any, Final, cast

from ..checkpoint.headers import fault, read_bytes, size_of
from .tokenizer_folder import tokenizer_files

_MAX_TEXT_BYTES: Final = 64 << 20
"""The largest tokenizer file; the largest known tokenizer has 35 MB."""
MAX_ENTRIES: Final = 1_000_000
"""The most tokens, and merges: twice the most known (Gemma's 514,906 merges). The library takes
about 20 us of CPU time for each."""
_BYTES_AN_ENTRY: Final = 4  # at least: two quotes, a character and a comma


def require_reasonable(folder: Path) -> None:
    """Refuses files that are too large. Raises InvalidCheckpoint, which names the file."""
    for path in tokenizer_files(folder):
        if (size := size_of(path)) > _MAX_TEXT_BYTES:
            raise fault(path, f"has {size} bytes, over the limit of {_MAX_TEXT_BYTES}")
        if size > MAX_ENTRIES * _BYTES_AN_ENTRY:
            _count(path, read_bytes(path, 0, size))


def _count(path: Path, raw: bytes) -> None:
    match path.name:
        case "merges.txt" | "vocab.txt":
            _limit(path, "lines", raw.count(b"\n"))
        case "tokenizer.json" | "vocab.json":
            strings = raw.count(b'"') // 2
            # Merges as pairs are two strings each; more strings exceed one limit or the other.
            _limit(path, "tokens and parts of merges", strings, factor=3)
            if strings > MAX_ENTRIES:
                _limit_parsed(path, raw)
        case _:
            return


def _limit_parsed(path: Path, raw: bytes) -> None:
    try:
        whole: Any = json.loads(raw)
    except (ValueError, RecursionError):  # the loader reports this error
        return
    table = cast("dict[str, Any]", whole) if isinstance(whole, dict) else {}
    if path.name == "vocab.json":
        _limit(path, "tokens", len(table))
        return
    model = table.get("model")
    for field, what in (("vocab", "tokens"), ("merges", "merges")):
        entries = cast("dict[str, Any]", model).get(field) if isinstance(model, dict) else None
        _limit(
            path, what, len(cast("list[Any]", entries)) if isinstance(entries, dict | list) else 0
        )


def _limit(path: Path, what: str, count: int, factor: int = 1) -> None:
    if count > (limit := factor * MAX_ENTRIES):
        remedy = "Use the tokenizer of the model that this one was made of."
        message = f"has {count:,} {what}, over the limit of {limit:,}"
        raise fault(path, message, remedy=remedy)
