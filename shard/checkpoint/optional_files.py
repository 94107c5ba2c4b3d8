"""Files that a model need not have: one that cannot be read counts as missing, and is named.

A note is a whole sentence with the model, the file, the fault and the remedy.
"""

import os
from pathlib import Path

from ...placement.errors import InvalidCheckpoint
from .headers import MAX_OBJECT_BYTES, fault, read_object, read_whole, text_of


def optional_object(path: Path, notes: list[str]) -> dict[str, object]:
    """The JSON object in a file; empty without a readable one."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_object(path)
    except InvalidCheckpoint as error:
        notes.append(f"ignored: {error.message}")
        return {}


def optional_text(path: Path, notes: list[str]) -> str:
    """The text of a file, its lines ended by "\\n"; empty without a readable one."""
    if not os.path.lexists(path):
        return ""
    try:
        raw = read_whole(path, MAX_OBJECT_BYTES)
        try:
            return text_of(raw).replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise fault(path, f"is not UTF-8 ({error.reason})") from error
    except InvalidCheckpoint as error:
        notes.append(f"ignored: {error.message}")
        return ""
